"""Gradients made in `training_step`, which Lightning clears right after it: closure = step, zero_grad, backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.optim import Optimizer

Gradients = list[tuple[torch.Tensor, torch.Tensor]]


class FreshGradients:
    """Keeps gradients of the pipeline from `zero_grad`, and gives them back in `backward`.

    Parameters that no optimizer has keep their gradients from batch to batch, as on one process. What they have from
    earlier windows is not there while a batch makes its own, which several ranks may sum.
    """

    def __init__(self) -> None:
        self._fresh: Gradients | None = None
        self._others: list[torch.Tensor] = []
        self._carried: Gradients = []  # what no optimizer clears, from before this accumulation window

    @contextmanager
    def set_aside(
        self, optimizers: Iterable[Optimizer], unstepped: Sequence[torch.Tensor], first: bool, keep_old: bool = False
    ) -> Iterator[None]:
        """Set aside the gradients that the block makes.

        On the `first` batch of an accumulation window the old ones of the optimizers' parameters go first, because
        Lightning is about to clear them; with `keep_old` it decides, at the price of holding both. On later batches
        gradients just add up.

        Args:
            unstepped: parameters of this rank that no optimizer has.
        """
        self._fresh = None
        if not first:
            for p, before in self._carried:
                p.grad = None if p.grad is None else p.grad - before
            yield
            for p, before in self._carried:
                p.grad = before if p.grad is None else p.grad + before
            return
        stepped = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        known = {id(p) for p in stepped}
        self._others = [p for p in unstepped if id(p) not in known]
        old = [p.grad if keep_old else None for p in stepped] + [p.grad for p in self._others]
        for p in (*stepped, *self._others):
            p.grad = None
        yield
        self._fresh = [(p, p.grad) for p in (*stepped, *self._others) if p.grad is not None]
        for p, grad in zip((*stepped, *self._others), old, strict=True):
            p.grad = grad

    def give_back(self) -> None:
        """Add the gradients set aside to the ones Lightning has left."""
        if self._fresh is not None:
            self._carried = [(p, p.grad) for p in self._others if p.grad is not None]
        for p, grad in self._fresh or ():
            p.grad = grad if p.grad is None else p.grad + grad
        self._fresh = None
