"""Checks that an optimizer steps each parameter by itself, as ranks step their own layers only.

Optimizers of torch do. Of any other a copy steps a few small parameters, and another copy some of these alone: what
comes of them must be the same.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_pipes.engine.compute.rng import forked_rng, seed_all
from lightning_pipes.engine.private_torch import Clipping, step_hooks
from lightning_pipes.ir import PipelineError

_STEPS = 2
"""Steps that are compared: the first makes the state."""
_TENSORS = 4
"""Parameters of a group that are stepped."""
_SIZE = 2
"""Entries along each axis of such a parameter."""


def check_steps_apart(optimizers: Sequence[Optimizer], is_asynchronous: bool) -> None:
    """Refuse optimizers with a step for one parameter that depends on others.

    What a step takes by torch's `clip_grad_norm_` or `get_total_norm` is that of all ranks, unless stages step apart.

    Raises:
        PipelineError: an optimizer computes something from all parameters, or draws random numbers for one after
            another.
    """
    for optimizer in optimizers:
        first = next((p for group in optimizer.param_groups for p in group["params"]), None)
        if first is None or type(optimizer).__module__.partition(".")[0] == "torch":
            continue
        name = type(optimizer).__name__
        try:
            with _equal_norms(not is_asynchronous), forked_rng(first.device):
                found = _compare(optimizer)
        except Exception as error:  # one that steps nothing but what it was made for
            rank_zero_warn(
                f"it is unknown whether {name} steps each parameter by itself: it does not step small ones "
                f"({type(error).__name__}: {error}). Every rank steps the parameters of its layers, so an optimizer "
                "with a norm over all of them would differ from one process"
            )
            continue
        if found == "random":
            raise PipelineError(
                f"{name} draws random numbers for one parameter after another. Every rank steps the parameters of its "
                "layers, and would draw other numbers than one process. Add the noise to gradients in "
                "on_before_optimizer_step, where it is that of one process"
            )
        if found == "all":
            way_out = (
                ""
                if is_asynchronous
                else ("; by torch.nn.utils.clip_grad_norm_ or get_total_norm in its step it gets the norm of all ranks")
            )
            raise PipelineError(
                f"{name} steps a parameter by what it finds in others, as by a norm over all gradients; every rank "
                "steps the parameters of its layers, and would take the norm of these. Use gradient_clip_val of the "
                f"Trainer, or an optimizer that steps each parameter by itself{way_out}"
            )


def _compare(optimizer: Optimizer) -> str:
    """Return the other inputs of a parameter's step: "random" numbers, "all" parameters, or ""."""
    whole = _step_copies(optimizer, range(_TENSORS), seed=0)
    if not _same(whole, _step_copies(optimizer, range(_TENSORS), seed=1)):
        return "random"
    halves = [_step_copies(optimizer, range(start, _TENSORS, 2), seed=0) for start in (0, 1)]
    return "" if all(_same(half, whole) for half in halves) else "all"


def _same(some: dict[tuple[int, int], torch.Tensor], whole: dict[tuple[int, int], torch.Tensor]) -> bool:
    return all(torch.allclose(value, whole[key], rtol=1e-4, atol=1e-6, equal_nan=True) for key, value in some.items())


def _step_copies(optimizer: Optimizer, kept: Sequence[int], seed: int) -> dict[tuple[int, int], torch.Tensor]:
    """Return small parameters after steps of a copy of `optimizer`, by group and number; it has those `kept`."""
    small: dict[tuple[int, int], nn.Parameter] = {}
    gradients: dict[tuple[int, int], torch.Tensor] = {}
    memo: dict[int, Any] = {}
    for g, group in enumerate(optimizer.param_groups):
        known = group["params"] or [torch.zeros(_SIZE)]
        for n in range(_TENSORS):
            like = known[n * len(known) // _TENSORS]
            generator = torch.Generator().manual_seed(100 * g + n)
            shape, kind = (_SIZE,) * like.ndim, {"dtype": like.dtype, "device": like.device}
            value, gradient = ((n + 1) * torch.randn(shape, generator=generator) for _ in range(2))
            small[g, n] = nn.Parameter(value.to(**kind))
            gradients[g, n] = gradient.to(**kind)
        for n, p in enumerate(group["params"]):
            memo[id(p)] = small[g, n % _TENSORS]
    chosen = {g: [small[g, n] for n in kept] for g, _ in enumerate(optimizer.param_groups)}
    made = _copy(optimizer, chosen, memo)

    @torch.enable_grad()
    def closure() -> torch.Tensor:
        for (g, n), p in small.items():
            p.grad = (gradients[g, n] + 0.5 * p.detach()) if n in kept else None
        return torch.ones((), requires_grad=True)

    seed_all(seed, next(iter(small.values())).device)
    for _ in range(_STEPS):
        made.step(closure)  # type: ignore[arg-type]
    return {(g, n): p.detach() for (g, n), p in small.items() if n in kept}


def _copy(optimizer: Optimizer, chosen: dict[int, list[nn.Parameter]], memo: dict[int, Any]) -> Optimizer:
    """Return a copy of an optimizer without state and hooks, and of those inside of it, with the `chosen` parameters
    of each group."""
    made: Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = made
    for g, group in enumerate(optimizer.param_groups):
        memo[id(group["params"])] = chosen[g]
    memo[id(optimizer.state)] = defaultdict(dict)
    for hooks in step_hooks(optimizer):
        memo[id(hooks)] = OrderedDict[int, Any]()
    own = {key: value for key, value in vars(optimizer).items() if key != "step"}  # which schedulers and we replace
    for value in own.values():
        if isinstance(value, Optimizer) and id(value) not in memo:
            _copy(value, chosen, memo)
    vars(made).update({key: copy.deepcopy(value, memo) for key, value in own.items()})
    return made


@contextmanager
def _equal_norms(equal: bool) -> Iterator[None]:
    """Fix torch's norm over several tensors for the block, if `equal`, as all ranks will have one norm."""

    def one(original: Callable[..., torch.Tensor], tensors: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.ones(())

    undo = Clipping.around(Clipping.NORM, one) if equal else (lambda: None)
    try:
        yield
    finally:
        undo()
