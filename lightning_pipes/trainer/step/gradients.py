"""Gradients made in `training_step`, which Lightning clears right after it: closure = step, zero_grad, backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.optim import Optimizer


class FreshGradients:
    """Keeps what the pipeline computes out of the way of `zero_grad`, and gives it back in `backward`."""

    def __init__(self) -> None:
        self._fresh: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    @contextmanager
    def made(self, optimizers: Iterable[Optimizer], first: bool, keep_old: bool = False) -> Iterator[None]:
        """Sets aside the gradients that the block makes for the optimizers' parameters.

        On the `first` batch of an accumulation window the old ones go first, because Lightning is about to clear
        them; with `keep_old` it decides, at the price of holding both. On later batches gradients just add up.
        """
        self._fresh = None
        if not first:
            yield
            return
        parameters = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        old = [p.grad for p in parameters] if keep_old else [None] * len(parameters)
        for p in parameters:
            p.grad = None
        yield
        self._fresh = [(p, p.grad) for p in parameters if p.grad is not None]
        for p, grad in zip(parameters, old, strict=True):
            p.grad = grad

    def give_back(self) -> None:
        """Adds what was set aside to what Lightning has left."""
        for p, grad in self._fresh or ():
            p.grad = grad if p.grad is None else p.grad + grad
        self._fresh = None
