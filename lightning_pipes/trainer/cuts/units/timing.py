"""Measurement of the units of a step: the durations of forward and backward, and the bytes saved for backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_pipes.engine.compute.footprint import saved_for_backward, storage_of
from lightning_pipes.ir.clock import read_seconds
from lightning_pipes.trainer.cuts.units.mode import Function, UnitMode
from lightning_pipes.trainer.cuts.units.recording import StepRecord
from lightning_pipes.trainer.cuts.units.trace import tensors_of
from lightning_pipes.trainer.private_lightning import is_compiled

_MAX_TIMED_STEPS = 8
"""The largest number of measured steps. The shortest duration of each unit counts."""
_MAX_TIMING_SECONDS = 1.0
"""After this number of seconds, no further step is measured."""


class UnitSeconds(NamedTuple):
    """The durations of a unit.

    Attributes:
        forward: the duration of its forward.
        backward: the duration of its backward.
        inputs: the part of its backward that computes no gradients of weights, or None if this was not measured.
    """

    forward: float
    backward: float
    inputs: float | None = None

    def shorter(self, other: UnitSeconds) -> UnitSeconds:
        """Return the shorter one of two measurements, separately for each part."""
        both = None if self.inputs is None or other.inputs is None else min(self.inputs, other.inputs)
        return UnitSeconds(min(self.forward, other.forward), min(self.backward, other.backward), both)


@dataclass(frozen=True)
class UnitCosts:
    """The costs of each unit for one number of samples.

    Attributes:
        seconds: its durations.
        saved: the bytes that it saves for its backward, without weights and without the bytes that earlier units saved.
    """

    seconds: Sequence[UnitSeconds]
    saved: Sequence[int]


class SavedByUnits(UnitMode):
    """Counts the bytes that the units of one step save for backward."""

    def __init__(self, atomic: Mapping[str, nn.Module]) -> None:
        super().__init__(atomic)
        self._found: Mapping[tuple[int, int], torch.Tensor] = {}
        self._weights: frozenset[tuple[int, int]] = frozenset()
        self._counted = 0
        self._bytes: list[int] = []

    def measure(
        self, module: nn.Module, step: Callable[..., Any], batch: Callable[[], Any], arguments: Sequence[Any]
    ) -> list[int]:
        """Run a step and return the saved bytes of each unit.

        Args:
            module: the user's module.
            step: takes the batch and `arguments`.
            batch: returns a new copy of the batch.
            arguments: further arguments of the step.
        """
        self._weights = frozenset(map(storage_of, module.parameters()))
        given = batch()
        with saved_for_backward() as self._found, self:
            step(given, *arguments)
        self._found = {}
        return self._bytes

    def run_unit(self, name: str, path: str | None, function: Function, args: Any, kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        new = [*islice(self._found, self._counted, None)]
        self._counted += len(new)
        self._bytes.append(sum(storage[1] for storage in new if storage not in self._weights))
        return out


class UnitTimer(UnitMode):
    """Measures the durations of the units of one step.

    Backward runs the units in reverse order. The gradient of a unit's result is available when the backward of the unit
    begins and the backward of the unit behind it has ended.

    Args:
        atomic: modules whose calls are units, by path.
        device: the device of the module.
        only_inputs: whether the backward computes no gradients of weights, as in the first half of a split backward.
    """

    def __init__(self, atomic: Mapping[str, nn.Module], device: torch.device, only_inputs: bool = False) -> None:
        super().__init__(atomic)
        self.names: list[str] = []
        self._device = device
        self._only_inputs = only_inputs
        self._seconds: list[float] = []
        self._reached: list[tuple[float, int]] = []
        self._entries: list[GradientEdge] = []
        """The results that depend on weights, but not on results of earlier units."""

    def measure(
        self,
        module: nn.Module,
        step: Callable[..., Any],
        batch: Callable[[], Any],
        arguments: Sequence[Any],
        read_loss: Callable[[Any], torch.Tensor],
    ) -> list[tuple[float, float]]:
        """Return the seconds of each unit of a step, forward and backward.

        Args:
            module: the user's module.
            step: takes the batch and `arguments`.
            batch: returns a new copy of the batch.
            arguments: further arguments of the step.
            read_loss: returns the loss from the result of the step.
        """
        given = batch()
        with self:
            out = step(given, *arguments)
        loss = read_loss(out)
        weights = [p for p in module.parameters() if p.requires_grad]
        self._reached.append((self._now(), len(self._seconds) - 1))
        backward = [0.0] * len(self._seconds)
        torch.autograd.grad(loss, self._entries if self._only_inputs else weights, allow_unused=True)
        ends = [*(begun for begun, _ in self._reached[1:]), self._now()]
        for (begun, unit), end in zip(self._reached, ends, strict=True):
            backward[unit] += end - begun
        return list(zip(self._seconds, backward, strict=True))

    def run_unit(self, name: str, path: str | None, function: Function, args: Any, kwargs: Any) -> Any:
        follows = self._only_inputs and any(tensor.grad_fn is not None for tensor in tensors_of((args, kwargs)))
        begun = self._now()
        out = function(*args, **kwargs)
        self._seconds.append(self._now() - begun)
        self.names.append(name)
        made = [tensor for tensor in tensors_of(out) if tensor.grad_fn is not None]
        for tensor in made:
            tensor.register_hook(partial(self._reach, len(self._seconds) - 1))  # type: ignore[no-untyped-call]
        if self._only_inputs and not follows:
            self._entries += map(get_gradient_edge, made)
        return out

    def _reach(self, unit: int, gradient: torch.Tensor) -> None:
        self._reached.append((self._now(), unit))

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return read_seconds()


def measure_units(
    module: nn.Module,
    record: StepRecord,
    run: Callable[[Callable[[], list[tuple[float, float]]]], list[tuple[float, float]]],
    step: Callable[..., Any],
    batch: Callable[[], Any],
    arguments: Sequence[Any],
    device: torch.device,
    read_loss: Callable[[Any], torch.Tensor],
    split: bool = False,
) -> list[UnitSeconds] | None:
    """Return the seconds of each unit of a record, forward and backward.

    Args:
        module: the user's module.
        record: the recorded step.
        run: calls its argument and returns the result, such that no trace is left in the module.
        step: takes the batch and `arguments`.
        batch: returns a new copy of the batch.
        arguments: further arguments of the step.
        device: the device of the module.
        read_loss: returns the loss from the result of the step.
        split: whether to also measure the part of backwards that computes no gradients of weights.

    Returns:
        The seconds; None if the step takes another path than recorded.
    """
    best: list[UnitSeconds] = []
    names = [unit.name for unit in record.units]
    if any(map(is_compiled, module.modules())):  # they compile in the first call
        run(lambda: step(batch(), *arguments) and [])
    begun = read_seconds()
    for _ in range(_MAX_TIMED_STEPS):
        found = []
        for only_inputs in (False, True) if split else (False,):
            timer = UnitTimer({path: module.get_submodule(path) for path in record.atomic}, device, only_inputs)
            found.append(run(partial(timer.measure, module, step, batch, arguments, read_loss)))
            if timer.names != names:
                return None
        inputs = [seconds for _, seconds in found[1]] if split else [None] * len(names)
        of_step = [UnitSeconds(*both, part) for both, part in zip(found[0], inputs, strict=True)]
        best = shortest(best, of_step) if best else of_step
        if read_seconds() - begun > _MAX_TIMING_SECONDS:
            break
    return best


def shortest(*measured: Sequence[UnitSeconds]) -> list[UnitSeconds]:
    """Return the shortest durations of each unit."""
    return [reduce(UnitSeconds.shorter, each) for each in zip(*measured, strict=True)]
