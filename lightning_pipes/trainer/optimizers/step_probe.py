"""Checks that the step of an optimizer updates each parameter independently of all others.

This is required because each rank only steps the parameters of its own layers. Optimizers of torch satisfy it. For any
other optimizer, one copy steps a few small parameters, other copies step only some of these parameters, and the results
must be equal. An optimizer may also store a sum over all parameters and use it only in a late step. Therefore, stored
values that depend on several parameters are distorted, and later steps must not depend on the distorted values.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_pipes.engine.compute.rng import forked_rng, seed_all
from lightning_pipes.engine.private_torch import Clipping, step_hooks
from lightning_pipes.ir import PipelineError

_N_COMPARED_STEPS = 24
"""The number of steps that are compared, because an optimizer may couple parameters only after some steps."""
_N_LATE_STEPS = 1000
"""The number of further steps for an optimizer that stores a value that depends on several parameters."""
_DISTORTION_FACTOR = 1e3
"""The factor that distorts a stored value that depends on several parameters, to detect whether steps depend on it."""
_N_PROBE_TENSORS = 4
"""The number of small parameters that are stepped for each parameter group."""
_PROBE_AXIS_SIZE = 2
"""The number of entries along each axis of a small parameter."""


def check_steps_apart(optimizers: Sequence[Optimizer], is_asynchronous: bool) -> None:
    """Check that the step of one parameter does not depend on other parameters.

    If stages step together, the step may use norms from torch's `clip_grad_norm_` and `get_total_norm`, because these
    are norms over all ranks. If an optimizer can't step small parameters, a warning is issued instead.

    Args:
        optimizers: the optimizers of the user.
        is_asynchronous: whether stages step at different times.

    Raises:
        PipelineError: the step of an optimizer depends on several parameters, or it draws random numbers for one
            parameter after another.
    """
    for optimizer in optimizers:
        first = next((p for group in optimizer.param_groups for p in group["params"]), None)
        if first is None or _is_of_torch(optimizer):
            continue
        name = type(optimizer).__name__
        try:
            with _equal_norms(not is_asynchronous), forked_rng(first.device):
                found = _compare(optimizer)
        except Exception as error:  # an optimizer may only support its own parameters
            rank_zero_warn(
                f"it is unknown whether {name} steps each parameter separately, because it can't step small test "
                f"parameters ({type(error).__name__}: {error}). Every rank steps only the parameters of its layers, so "
                "an optimizer with a norm over all parameters would differ from one process"
            )
            continue
        if found == "random":
            raise PipelineError(
                f"{name} draws random numbers for one parameter after another. Every rank steps only the parameters of "
                "its layers, and would draw different numbers than one process. Add the noise to the gradients in "
                "on_before_optimizer_step, which draws the same numbers as one process"
            )
        if found == "all":
            way_out = (
                ""
                if is_asynchronous
                else ("; in its step, torch.nn.utils.clip_grad_norm_ and get_total_norm return the norm of all ranks")
            )
            raise PipelineError(
                f"the step of {name} for one parameter depends on other parameters, for example on a norm over all "
                "gradients. Every rank steps only the parameters of its layers, and would use the norm of these "
                "parameters. Use gradient_clip_val of the Trainer, or an optimizer that steps each parameter "
                f"separately{way_out}"
            )


def check_skips_unused(optimizers: Sequence[Optimizer]) -> None:
    """Check that optimizers do not change parameters without gradients, because some batches step only some layers.

    If an optimizer can't step small parameters, a warning is issued instead.

    Raises:
        PipelineError: an optimizer changes a parameter without a gradient.
    """
    for optimizer in optimizers:
        first = next((p for group in optimizer.param_groups for p in group["params"]), None)
        if first is None or _is_of_torch(optimizer):
            continue
        name = type(optimizer).__name__
        try:
            with _equal_norms(True), forked_rng(first.device):
                probe = _Probe(optimizer, range(_N_PROBE_TENSORS))
                probe.step(2)
                probe.skipped = frozenset(range(1, _N_PROBE_TENSORS))
                before = probe.values()
                probe.step(1)
                changed = [key for key, value in probe.values().items() if key[1] and not _close(value, before[key])]
        except Exception as error:
            rank_zero_warn(
                f"it is unknown whether {name} leaves parameters without gradients unchanged, because it can't step "
                f"small test parameters ({type(error).__name__}: {error}). A batch steps only the layers that it uses, "
                "so an optimizer that decays all weights in each step would differ from one process"
            )
            continue
        if changed:
            raise PipelineError(
                f"{name} changes parameters that have no gradients, for example by a decay of all weights in each "
                "step. Batches that overlap use different layers, and each batch steps only the layers that it uses, "
                "so the other layers would not be changed. Skip parameters without gradients, as the optimizers of "
                "torch do, or train with a schedule that flushes, such as '1f1b'"
            )


def _is_of_torch(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.partition(".")[0] == "torch"


def _compare(optimizer: Optimizer) -> str:
    """Return the unsupported inputs of a parameter's step: "random" numbers, "all" parameters, or "" for none."""
    whole, again, distorted = (_Probe(optimizer, range(_N_PROBE_TENSORS)) for _ in range(3))
    halves = [_Probe(optimizer, range(start, _N_PROBE_TENSORS, 2)) for start in (0, 1)]
    whole.step(_N_COMPARED_STEPS)
    again.step(_N_COMPARED_STEPS, seed=1)
    if not _same(whole.values(), again.values()):
        return "random"
    for half in halves:
        half.step(_N_COMPARED_STEPS)
    if not all(_same(half.values(), whole.values()) for half in halves):
        return "all"
    distorted.step(_N_COMPARED_STEPS)
    distorted_values = [distorted.distort(whole, half) for half in halves]
    if not any(distorted_values):
        return ""
    whole.step(_N_LATE_STEPS)
    distorted.step(_N_LATE_STEPS)
    ends = whole.values()
    equal = (torch.equal(value.nan_to_num(), ends[key].nan_to_num()) for key, value in distorted.values().items())
    return "" if all(equal) else "all"  # the same computations give the same bits


def _same(some: Mapping[tuple[int, int], torch.Tensor], whole: Mapping[tuple[int, int], torch.Tensor]) -> bool:
    return all(_close(value, whole[key]) for key, value in some.items())


def _close(value: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(value, other, rtol=1e-4, atol=1e-6, equal_nan=True)


class _Probe:
    """A copy of an optimizer that has small parameters instead of the original ones.

    Args:
        optimizer: the original optimizer.
        kept: the numbers of the small parameters of each group that the copy has.

    Attributes:
        skipped: the numbers of the parameters of each group that get no gradients.
    """

    def __init__(self, optimizer: Optimizer, kept: Sequence[int]) -> None:
        self.skipped: frozenset[int] = frozenset()
        self._kept = kept
        self._factor = 0.0
        self._small: dict[tuple[int, int], nn.Parameter] = {}
        self._gradients: dict[tuple[int, int], torch.Tensor] = {}
        memo: dict[int, Any] = {}
        for g, group in enumerate(optimizer.param_groups):
            known = group["params"] or [torch.zeros(_PROBE_AXIS_SIZE)]
            for n in range(_N_PROBE_TENSORS):
                like = known[n * len(known) // _N_PROBE_TENSORS]
                generator = torch.Generator().manual_seed(100 * g + n)
                shape, kind = (_PROBE_AXIS_SIZE,) * like.ndim, {"dtype": like.dtype, "device": like.device}
                value, gradient = ((n + 1) * torch.randn(shape, generator=generator) for _ in range(2))
                self._small[g, n] = nn.Parameter(value.to(**kind))
                self._gradients[g, n] = gradient.to(**kind)
            for n, p in enumerate(group["params"]):
                memo[id(p)] = self._small[g, n % _N_PROBE_TENSORS]
        chosen = {g: [self._small[g, n] for n in kept] for g, _ in enumerate(optimizer.param_groups)}
        self._optimizer = _copy(optimizer, chosen, memo)

    def step(self, steps: int, seed: int = 0) -> None:
        """Run several steps of the optimizer after setting the random seed."""
        seed_all(seed, next(iter(self._small.values())).device)
        for _ in range(steps):
            self._factor = 1.0 + (self._factor % 3)  # varies, so that gradients of late steps are not zero
            self._optimizer.step(self._set_gradients)  # type: ignore[arg-type]

    def values(self) -> dict[tuple[int, int], torch.Tensor]:
        """Return copies of the current parameters by the numbers of group and parameter."""
        return {(g, n): p.detach().clone() for (g, n), p in self._small.items() if n in self._kept}

    def distort(self, whole: _Probe, half: _Probe) -> bool:
        """Distort the stored values of this optimizer that differ between `whole` and `half`, and return whether there
        are any. `half` has a subset of the parameters of `whole`.
        """
        found = False
        for own, of_whole, of_half in zip(self._tables(), whole._tables(), half._tables(), strict=True):
            for key in own.keys() & of_whole.keys() & of_half.keys():
                if _is_number(own[key]) and not _are_equal(of_whole[key], of_half[key]):
                    own[key] = _DISTORTION_FACTOR * own[key] + 1
                    found = True
        return found

    def _tables(self) -> list[dict[Any, Any]]:
        """Return the dicts in which the optimizer stores values for itself, for each group, and for each parameter."""
        made = self._optimizer
        states = [made.state.get(p) for p in self._small.values()]
        return [vars(made), *made.param_groups, *(state if isinstance(state, dict) else {} for state in states)]

    @torch.enable_grad()
    def _set_gradients(self) -> torch.Tensor:
        for (g, n), p in self._small.items():
            has_gradient = n in self._kept and n not in self.skipped
            p.grad = (self._factor * self._gradients[g, n] + 0.5 * p.detach()) if has_gradient else None
        return torch.ones((), requires_grad=True)


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() or value.is_complex()
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and _close(one, other)
    return bool(one == other)


def _copy(optimizer: Optimizer, chosen: dict[int, list[nn.Parameter]], memo: dict[int, Any]) -> Optimizer:
    """Return a copy of an optimizer, and of all optimizers inside of it, without state and hooks.

    Args:
        optimizer: the optimizer.
        chosen: the parameters of each group of the copy.
        memo: the memo of `copy.deepcopy`, with the replacements of other objects.
    """
    made: Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = made
    for g, group in enumerate(optimizer.param_groups):
        memo[id(group["params"])] = chosen[g]
    memo[id(optimizer.state)] = defaultdict(dict)
    for hooks in step_hooks(optimizer):
        memo[id(hooks)] = OrderedDict[int, Any]()
    own = {key: value for key, value in vars(optimizer).items() if key != "step"}  # schedulers replace `step`, too
    for value in own.values():
        if isinstance(value, Optimizer) and id(value) not in memo:
            _copy(value, chosen, memo)
    vars(made).update({key: copy.deepcopy(value, memo) for key, value in own.items()})
    return made


@contextmanager
def _equal_norms(equal: bool) -> Iterator[None]:
    """If `equal`, make the norms that torch computes over several tensors constant while the block runs.

    This imitates norms over all ranks, which do not depend on the parameters that a rank has.
    """

    def one(original: Callable[..., torch.Tensor], tensors: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.ones(())

    undo = Clipping.around(Clipping.NORM, one) if equal else (lambda: None)
    try:
        yield
    finally:
        undo()
