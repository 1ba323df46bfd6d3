"""Hooks that the user's code has registered on parameters. They run once per batch, not once per micro-batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lightning_pipes.engine.compute.reducer import Reducer
from lightning_pipes.engine.compute.rng import RngUse
from lightning_pipes.engine.private_torch import accumulate_hooks, gradient_hooks, with_hooks


class ParameterHooks:
    """Makes hooks of parameters see the gradient of the whole batch.

    Args:
        device: the device of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._warned = False

    @contextmanager
    def defer_hooks(
        self,
        parameters: Sequence[nn.Parameter],
        reducer: Reducer | None,
        alone: bool,
        sum_gradients: Callable[[Sequence[nn.Parameter]], None],
    ) -> Iterator[None]:
        """Defer hooks to the end of the block, where each hook runs once with the gradient of the block.

        Args:
            parameters: the parameters whose hooks are deferred.
            reducer: the reducer, whose own hooks run inside the block, or None.
            alone: whether the optimizer step is for this batch alone.
            sum_gradients: completes the gradients of parameters that several ranks hold.
        """
        hooked, stepped = with_hooks(parameters)
        if reducer is not None:
            stepped = [p for p in stepped if not all(map(reducer.is_own_hook, accumulate_hooks(p).values()))]
        if not hooked and not stepped:
            yield
            return
        if reducer is not None and not alone:
            self._warn("run once for every micro-batch if replicas accumulate gradients")
            yield
            return
        both = [*{id(p): p for p in (*hooked, *stepped)}.values()]
        before = {id(p): p.grad for p in both}
        for p in both:
            p.grad = None
        aside = [_set_aside(gradient_hooks(p), None) for p in hooked]
        after = [_set_aside(accumulate_hooks(p), reducer) for p in stepped]
        try:
            yield
        finally:
            for table, found in (*aside, *after):
                table.update(found)
        sum_gradients(both)
        draws = RngUse(self._device)
        draws.start()
        of_gradients = {id(p): list(found.values()) for p, (_, found) in zip(hooked, aside, strict=True)}
        for p in reversed(both):  # in the order of backward
            grad, old = p.grad, before[id(p)]
            for hook in of_gradients.get(id(p), ()) if grad is not None else ():
                changed = hook(grad)
                grad = grad if changed is None else changed
            p.grad = old if grad is None else grad if old is None else old + grad
        for p, (_, found) in zip(reversed(stepped), reversed(after), strict=True):
            for hook in found.values() if p.grad is not None else ():
                hook(p)
        draws.stop()
        if draws.was_used:
            self._warn(
                "draw random numbers, which every rank does for its own layers only (draw them in "
                "on_before_optimizer_step instead, for each parameter of the module)"
            )

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            rank_zero_warn(f"hooks of parameters {what}, so that training differs from one process")


@contextmanager
def without_hooks(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Remove all hooks of parameters for the block, which computes gradients that no optimizer uses."""
    hooked, stepped = with_hooks(parameters)
    tables = [*map(gradient_hooks, hooked), *map(accumulate_hooks, stepped)]
    aside = [_set_aside(table, None) for table in tables]
    try:
        yield
    finally:
        for table, found in aside:
            table.update(found)


def warn_about_hooks(parameters: Sequence[nn.Parameter], reducer: Reducer | None) -> None:
    """Warn about hooks of parameters if batches overlap, because each hook call then sees only a part of a gradient."""
    number = sum(
        not all(reducer is not None and reducer.is_own_hook(hook) for hook in accumulate_hooks(p).values())
        or bool(gradient_hooks(p))
        for p in parameters
    )
    if number:
        warnings.warn(
            f"hooks of {number} parameters run once for every micro-batch where batches overlap, with a part of the "
            "gradient each. Training may differ from one process. Change gradients in "
            "on_before_optimizer_step, or use a schedule that flushes between batches, such as '1f1b'",
            stacklevel=2,
        )


def _set_aside(table: dict[int, Any], reducer: Reducer | None) -> tuple[dict[int, Any], dict[int, Any]]:
    """Remove the user's hooks from a table, and return the table and the hooks."""
    found = {key: hook for key, hook in table.items() if reducer is None or not reducer.is_own_hook(hook)}
    for key in found:
        del table[key]
    return table, found
