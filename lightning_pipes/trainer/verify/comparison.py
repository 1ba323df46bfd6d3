"""Comparison of values of a pipeline with those of one process, up to rounding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_pipes.ir import Span
from lightning_pipes.trainer.verify.record import Key, Phase

GRADIENTS = (Phase.GRADIENT, Phase.STEP_GRADIENT)
_NOISE = 10.0
"""Of the largest value of a kind so many roundings are no difference: sums of many numbers may cancel out."""


@dataclass(frozen=True)
class Rounding:
    """The rounding of the numbers that a batch is computed from.

    Attributes:
        eps: the distance from 1 to the next number, of the coarsest type.
        largest: the largest absolute value, by kind.
    """

    eps: float
    largest: Mapping[Phase, float]

    @classmethod
    def from_record(cls, values: Mapping[Key, Any], cast: torch.dtype | None) -> Rounding:
        """Return the rounding of a record; `cast` is the type of autocast operations, if there are any."""
        eps = 0.0 if cast is None else torch.finfo(cast).eps
        largest = dict.fromkeys(Phase, 0.0)
        for key, tensor in _tensors(values):
            if tensor.is_floating_point() and tensor.numel():
                if key.phase in (Phase.INPUT, Phase.OUTPUT, Phase.WEIGHT):
                    eps = max(eps, torch.finfo(tensor.dtype).eps)
                finite = tensor[torch.isfinite(tensor)]
                most = float(finite.abs().max()) if finite.numel() else 0.0
                largest[key.phase] = max(largest[key.phase], most)
        return cls(eps, largest)

    def allowed_difference(self, phase: Phase, theirs: torch.Tensor) -> float:
        """Return by how much a value may differ from one of the tensor `theirs`."""
        eps = max(self.eps, torch.finfo(theirs.dtype).eps)
        finite = theirs[torch.isfinite(theirs)]
        scale = float(finite.abs().max()) if finite.numel() else 0.0
        noise = _NOISE * eps * self.largest[phase] if phase in GRADIENTS else 0.0
        return float(eps ** (2 / 3) * scale + noise)


def _tensors(values: Mapping[Key, Any]) -> Iterator[tuple[Key, torch.Tensor]]:
    for key, value in values.items():
        for part in value.values() if isinstance(value, dict) else [value]:
            if isinstance(part, torch.Tensor):
                yield key, part


@dataclass(frozen=True)
class Difference:
    """A value that differs.

    Attributes:
        number: of the batch.
        ours, theirs: the value here and in one process, as text.
        where: the place in a tensor; empty where the whole value differs.
        rank: the global rank that has it.
        several: whether the batch is cut into several micro-batches.
    """

    number: int
    key: Key
    ours: str
    theirs: str
    where: str = ""
    rank: int = 0
    several: bool = False

    @property
    def order(self) -> tuple[int, int, int, str]:
        """Which of two differences comes first: gradients are made from the last layer to the first one."""
        phase, layer, name = self.key
        return self.number, phase, -layer if phase in GRADIENTS else layer, name


@dataclass
class Comparison:
    """Compares the values of this rank with the reference's, batch after batch.

    Args:
        rank: the global rank, for messages.

    Attributes:
        compared: tensors so far.
        largest: the largest difference so far, relative to the largest value of the tensor.
    """

    rank: int
    compared: int = 0
    largest: float = 0.0
    _noise: dict[str, torch.Tensor] = field(default_factory=dict)
    _before: dict[str, torch.Tensor] = field(default_factory=dict)

    def remember_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Learn the weights before the first batch."""
        self._before.update(weights)

    def forget_weights(self) -> None:
        """Let go of the weights; nothing else is compared."""
        self._noise.clear()
        self._before.clear()

    def compare_values(
        self, number: int, ours: Mapping[Key, Any], theirs: Mapping[Key, Any], rounding: Rounding
    ) -> list[Difference]:
        """Return the differences among the values of both."""
        found = []
        for key in sorted(ours.keys() & theirs.keys()):
            difference = self._compare(number, key, ours[key], theirs[key], rounding)
            found += [] if difference is None else [difference]
        return found

    def _compare(self, number: int, key: Key, ours: Any, theirs: Any, rounding: Rounding) -> Difference | None:
        if isinstance(ours, dict):
            return self._compare_spans(number, key, ours, theirs, rounding)
        if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (ours, theirs)):
            ours, theirs = torch.tensor(float(ours)).double(), torch.as_tensor(theirs).double()
        if not (isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)):
            return (
                None
                if format_value(ours) == format_value(theirs)
                else Difference(number, key, format_value(ours), format_value(theirs), "", self.rank)
            )
        return self._compare_tensors(number, key, ours, theirs, rounding)

    def _compare_spans(
        self,
        number: int,
        key: Key,
        ours: Mapping[Span, torch.Tensor],
        theirs: Mapping[Span, torch.Tensor],
        rounding: Rounding,
    ) -> Difference | None:
        ((batch, whole),) = theirs.items()
        for span, part in sorted(ours.items()):
            each = whole.size(0) // batch.rows if whole.ndim and whole.size(0) % batch.rows == 0 else 0
            own = whole
            if each and part.ndim and part.size(0) == each * span.rows:
                own = whole.narrow(0, span.start * each, span.rows * each)
            found = self._compare_tensors(number, key, part, own, rounding)
            if found is not None:
                where = f"samples {span.start} to {span.stop - 1}{', ' if found.where else ''}{found.where}"
                return Difference(number, key, found.ours, found.theirs, where, self.rank, len(ours) > 1)
        return None

    def _compare_tensors(
        self, number: int, key: Key, ours: torch.Tensor, theirs: torch.Tensor, rounding: Rounding
    ) -> Difference | None:
        self.compared += 1
        if ours.shape != theirs.shape:
            if ours.numel() != theirs.numel() or ours.numel() != 1:
                here, there = (f"shape {tuple(t.shape)}" for t in (ours, theirs))
                return Difference(number, key, here, there, "", self.rank)
            ours = ours.reshape(theirs.shape)
        if not theirs.numel():
            return None
        if not (theirs.is_floating_point() and ours.is_floating_point()):
            exact = ours.to(torch.complex128 if ours.is_complex() or theirs.is_complex() else torch.float64)
            wrong = exact != theirs.to(exact.dtype)
            return self._describe(number, key, ours, theirs, wrong.double()) if bool(wrong.any()) else None
        allowed = torch.full((), rounding.allowed_difference(key.phase, theirs), dtype=torch.float64)
        a, b = ours.double(), theirs.double()
        apart = torch.where(a == b, torch.zeros_like(a), (a - b).abs())
        apart = torch.where(a.isnan() & b.isnan(), torch.zeros_like(a), apart).nan_to_num(nan=torch.inf)
        if key.phase is Phase.STEP_GRADIENT:
            noise = (apart / torch.maximum(a.abs(), b.abs()).clamp_min(torch.finfo(torch.float64).tiny)).clamp_max(1.0)
            self._noise[key.name] = torch.maximum(noise, self._noise.get(key.name, noise))
        elif key.phase is Phase.WEIGHT:
            allowed = allowed + self._noise_of_step(key.name, a, b)
        scale = float(b.abs().nan_to_num(posinf=0.0).max()) or 1.0
        wrong = (apart - allowed).clamp_min(0.0)
        if bool((apart > allowed).any()):
            return self._describe(number, key, ours, theirs, torch.where(apart > allowed, apart, wrong))
        self.largest = max(self.largest, float(apart.max()) / scale)
        return None

    def _noise_of_step(self, name: str, ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
        """Return the allowed difference of a weight: Adam makes a whole step of a gradient that is rounding."""
        before = self._before.get(name)
        self._before[name] = theirs
        noise = self._noise.get(name)
        if before is None or noise is None or noise.shape != theirs.shape:
            return torch.zeros(())
        before = before.double()
        return 4 * noise * torch.maximum((ours - before).abs(), (theirs - before).abs())

    def _describe(
        self, number: int, key: Key, ours: torch.Tensor, theirs: torch.Tensor, apart: torch.Tensor
    ) -> Difference:
        place = int(apart.reshape(-1).argmax())
        wrong = int((apart > 0).sum())
        index = [int(n) for n in torch.unravel_index(torch.tensor(place), apart.shape)] if apart.ndim else []
        where = f"at {index}, {wrong} of {apart.numel()} values differ" if index else ""
        here, there = (format_value(t.reshape(-1)[place].item()) for t in (ours, theirs))
        return Difference(number, key, here, there, where, self.rank)


def format_value(value: Any) -> str:
    """Return a value as text."""
    return f"{value:.8g}" if isinstance(value, float) else str(value)
