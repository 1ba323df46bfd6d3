"""Comparison of a pipeline's values with the values of one process, up to rounding.

It finds the first difference and describes its place and its likely reason. Results are written to a file for the
command `lightning-pipes verify`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_pipes.engine.private_torch import BatchNorm
from lightning_pipes.ir import Span
from lightning_pipes.trainer.verify.record import OUTSIDE, Phase, ValueKey

GRADIENTS = (Phase.GRADIENT, Phase.STEP_GRADIENT)
_MAX_DIFFERENCE_RATIO = 3.0
"""The allowed difference of a pipeline, as a multiple of the largest difference between repetitions.

A pipeline may take the other side of more jumps than a repetition.
"""
NEGLIGIBLE_EPS = 1e-12
"""A rounding that is too small to matter, because hardly any value is so close to a jump.

The rounding of float64 is smaller.
"""
_NOISE_ROUNDINGS = 10.0
"""The number of roundings of the largest value of a kind that do not count as a difference.

It is larger than 1 because sums of many numbers may cancel.
"""


@dataclass(frozen=True)
class Rounding:
    """The rounding of the numbers from which a batch is computed.

    Attributes:
        eps: the distance from 1 to the next larger number, for the coarsest dtype.
        largest: the largest absolute value, by kind.
    """

    eps: float
    largest: Mapping[Phase, float]

    @classmethod
    def from_record(cls, values: Mapping[ValueKey, Any], cast: torch.dtype | None) -> Rounding:
        """Return the rounding of a record.

        Args:
            values: the values of the record.
            cast: the dtype of autocast operations, or None without autocast.
        """
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
        """Return the largest difference that is allowed for a value in the tensor `theirs`."""
        eps = max(self.eps, torch.finfo(theirs.dtype).eps)
        finite = theirs[torch.isfinite(theirs)]
        scale = float(finite.abs().max()) if finite.numel() else 0.0
        noise = _NOISE_ROUNDINGS * eps * self.largest[phase] if phase in GRADIENTS else 0.0
        return float(eps ** (2 / 3) * scale + noise)


def _tensors(values: Mapping[ValueKey, Any]) -> Iterator[tuple[ValueKey, torch.Tensor]]:
    for key, value in values.items():
        for part in value.values() if isinstance(value, dict) else [value]:
            if isinstance(part, torch.Tensor):
                yield key, part


class RepetitionSpread:
    """The largest differences between repetitions of a batch in one process, with weights that are rounded differently.

    A value that depends on the sides of many jumps differs from the pipeline's value by a similar amount.
    """

    def __init__(self) -> None:
        self._first: dict[ValueKey, torch.Tensor] = {}
        self._most: dict[ValueKey, torch.Tensor] = {}

    def add(self, values: Mapping[ValueKey, Any]) -> None:
        """Add the values of a repetition.

        The values that are added first are the ones with which later values are compared.
        """
        for key, tensor in _tensors(values):
            first = self._first.setdefault(key, tensor)
            if tensor.is_floating_point() and tensor.shape == first.shape:
                apart = (tensor.double() - first.double()).abs().nan_to_num(nan=0.0)
                self._most[key] = torch.maximum(apart, self._most.get(key, apart))

    def allowed_difference(self, key: ValueKey, like: torch.Tensor) -> torch.Tensor:
        """Return the largest allowed difference of each element from its first value, or 0 if it is unknown."""
        most = self._most.get(key)
        return torch.zeros(()) if most is None or most.shape != like.shape else _MAX_DIFFERENCE_RATIO * most


@dataclass(frozen=True)
class Difference:
    """A value that differs.

    Attributes:
        number: the number of the batch.
        key: the key of the value.
        ours: the value on this rank, as text.
        theirs: the value in one process, as text.
        where: the position in a tensor, or an empty string if the whole value differs.
        rank: the global rank that found the difference.
        several: whether the batch is cut into several micro-batches.
    """

    number: int
    key: ValueKey
    ours: str
    theirs: str
    where: str = ""
    rank: int = 0
    several: bool = False

    @property
    def order(self) -> tuple[int, int, int, str]:
        """The sort key of differences. Gradients are computed from the last layer to the first layer."""
        phase, layer, name = self.key
        return self.number, phase, -layer if phase in GRADIENTS else layer, name


@dataclass
class Comparison:
    """Compare the values of this rank with the values of the reference, batch by batch.

    Args:
        rank: the global rank, for messages.

    Attributes:
        compared: number of tensors that have been compared.
        largest: the largest difference so far, relative to the largest value of the tensor.
    """

    rank: int
    compared: int = 0
    largest: float = 0.0
    _noise: dict[str, torch.Tensor] = field(default_factory=dict)
    _before: dict[str, torch.Tensor] = field(default_factory=dict)
    _longest_step: dict[str, torch.Tensor] = field(default_factory=dict)
    _allowed: dict[str, torch.Tensor] = field(default_factory=dict)
    _spread: RepetitionSpread = field(default_factory=RepetitionSpread)

    def remember_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Store the weights before the first batch."""
        self._before.update(weights)

    def forget_weights(self) -> None:
        """Drop the stored weights, after which nothing else is compared."""
        for values in (self._noise, self._before, self._longest_step, self._allowed):
            values.clear()

    def copy_state(self) -> tuple[Any, ...]:
        """Return a copy of the state that the comparison of a batch changes, for `set_state`."""
        tables = (self._noise, self._before, self._longest_step, self._allowed)
        return self.compared, self.largest, *map(dict, tables)

    def set_state(self, state: tuple[Any, ...]) -> None:
        """Restore the state that `copy_state` returned, which undoes the comparisons since then."""
        self.compared, self.largest, self._noise, self._before, self._longest_step, self._allowed = state

    def compare_values(
        self,
        number: int,
        ours: Mapping[ValueKey, Any],
        theirs: Mapping[ValueKey, Any],
        rounding: Rounding,
        spread: RepetitionSpread | None = None,
    ) -> list[Difference]:
        """Return the differences between the values that both sides have.

        Args:
            number: the number of the batch.
            ours: the values on this rank.
            theirs: the values in one process.
            rounding: the rounding of the numbers from which the batch is computed.
            spread: the spread of repetitions, by which values may differ in addition to rounding.
        """
        self._spread = spread or RepetitionSpread()
        found = []
        for key in sorted(ours.keys() & theirs.keys()):
            difference = self._compare(number, key, ours[key], theirs[key], rounding)
            found += [] if difference is None else [difference]
        return found

    def _compare(self, number: int, key: ValueKey, ours: Any, theirs: Any, rounding: Rounding) -> Difference | None:
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
        return self._compare_tensors(number, key, ours, theirs, rounding, self._spread.allowed_difference(key, theirs))

    def _compare_spans(
        self,
        number: int,
        key: ValueKey,
        ours: Mapping[Span, torch.Tensor],
        theirs: Mapping[Span, torch.Tensor],
        rounding: Rounding,
    ) -> Difference | None:
        ((batch, whole),) = theirs.items()
        for span, part in sorted(ours.items()):
            each = whole.size(0) // batch.rows if whole.ndim and whole.size(0) % batch.rows == 0 else 0
            own, apart = whole, self._spread.allowed_difference(key, whole)
            if each and part.ndim and part.size(0) == each * span.rows:
                own = whole.narrow(0, span.start * each, span.rows * each)
                apart = apart.narrow(0, span.start * each, span.rows * each) if apart.ndim else apart
            found = self._compare_tensors(number, key, part, own, rounding, apart)
            if found is not None:
                where = f"samples {span.start} to {span.stop - 1}{', ' if found.where else ''}{found.where}"
                return Difference(number, key, found.ours, found.theirs, where, self.rank, len(ours) > 1)
        return None

    def _compare_tensors(
        self,
        number: int,
        key: ValueKey,
        ours: torch.Tensor,
        theirs: torch.Tensor,
        rounding: Rounding,
        spread: torch.Tensor,
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
        allowed = torch.full((), rounding.allowed_difference(key.phase, theirs), dtype=torch.float64) + spread
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
        """Return the allowed difference of a weight after a step.

        A gradient that consists of rounding only, such as the gradient of the bias of keys in attention, still makes
        Adam take a full step.

        Differences of earlier steps remain in the weight. They also remain in the momentum, which may make later steps
        shorter. The allowed differences of all steps are therefore added, and each of them is based on the longest step
        so far.
        """
        before = self._before.get(name)
        self._before[name] = theirs
        noise = self._noise.get(name)
        if before is None or noise is None or noise.shape != theirs.shape:
            return torch.zeros(())
        before = before.double()
        step = torch.maximum((ours - before).abs(), (theirs - before).abs())
        step = self._longest_step[name] = torch.maximum(step, self._longest_step.get(name, step))
        allowed = self._allowed[name] = self._allowed.get(name, torch.zeros(())) + 4 * noise * step
        return allowed

    def _describe(
        self, number: int, key: ValueKey, ours: torch.Tensor, theirs: torch.Tensor, apart: torch.Tensor
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


_CUT = "Set microbatches=1, or write code that treats each sample separately"

DIFFERENCE_REASONS = {
    Phase.BATCH: "the batches differ: a sampler or dataset draws numbers that depend on the process, or reads a file "
    "or stream that is already open",
    Phase.MODE: "a part of the module is in training mode here and in evaluation mode there, or the other way round: "
    "train() or eval() was called on some ranks only, or was not called",
    Phase.FROZEN: "requires_grad was changed on some ranks only, by a hook that runs on one rank or between batches",
    Phase.OUTPUT: "the layer gets the same samples but returns a different result: it uses other samples of the batch, "
    f"reads an attribute that differs by rank, or draws random numbers that do not depend on the sample. {_CUT}",
    Phase.LOSS: "the layers return the same outputs, so the code after the layers causes the difference: a loss that "
    "is not a mean over samples, an auxiliary loss that layers of other stages store in an attribute, list or buffer, "
    f"or samples that are compared with each other. {_CUT}, and make layers return the values that the loss needs "
    "along with their output",
    Phase.GRADIENT: "inputs and loss are the same, so the difference arises in the backward pass: a hook on a "
    "parameter, tensor or module that runs for each micro-batch, a part of the loss that layers of other stages store, "
    "on_after_backward, or gradients that were not cleared",
    Phase.STEP_GRADIENT: "the gradients of the batch are the same, so code that changes them before the step causes "
    "the difference: clipping in optimizer_step or in a hook by the norm of the weights of one stage, or a hook that "
    "does not run on this rank. Use the Trainer's gradient_clip_val, or configure_gradient_clipping",
    Phase.SETTING: "a scheduler or hook changes the optimizer on some ranks only, or by a different number",
    Phase.WEIGHT: "the optimizer gets the same gradients, so the difference arises later: an optimizer that uses all "
    "weights at once (a norm over all of them, several closures), a hook that changes weights after the step on some "
    "ranks only, or weights that are stepped without a gradient, for example after zero_grad(set_to_none=False)",
    Phase.BUFFER: "the buffers of the layers are updated for each micro-batch, or on some ranks only, as the running "
    f"statistics of BatchNorm are. {_CUT}",
    Phase.LOG: "a logged value is not a mean over samples, or a hook logs a value that only one rank has. Log it with "
    "reduce_fx, or as a torchmetrics object",
}


MIXING_REASONS = {
    Phase.LOSS: "layers or the loss use several samples of a batch together, or read state that the earlier "
    "micro-batches of the batch have changed, such as queues, running means and counters",
    Phase.GRADIENT: "the loss is the same, so the difference arises in the backward pass of this layer or of code "
    "between it and the loss: a backward of its own or a hook that uses several samples together, or gradients that "
    "are scaled by the content of a batch, as with scale_grad_by_freq",
}
"""The likely reasons for differences between a whole batch and its micro-batches in one pipeline."""


def likely_reason(
    difference: Difference, notes: Sequence[str], layers: Sequence[Any], names: Sequence[str] = ()
) -> str:
    """Return the most likely reason for a difference.

    Args:
        difference: the difference.
        notes: the notes of the reference about the batch, which name random operations that are not done per sample.
        layers: the layers of the whole module, by number.
        names: the paths of the layers, if there is no container that numbers them.
    """
    phase = difference.key.phase
    if notes and phase not in (Phase.BATCH, Phase.MODE, Phase.FROZEN, Phase.SETTING):
        return (
            f"the step {', '.join(notes[:3])} once for a whole batch, and every micro-batch draws its own numbers. "
            "Draw separate random numbers for each sample"
        )
    if phase is Phase.INPUT:
        return _reason_of_input(difference, layers, names)
    return DIFFERENCE_REASONS[phase]


def _reason_of_input(difference: Difference, layers: Sequence[Any], names: Sequence[str]) -> str:
    layer = difference.key.layer
    if layer > 0 and names:
        return (
            f"{names[layer - 1]!r}, or code between it and {names[layer]!r}, gets the same input but returns a "
            "different result: it uses other samples of the batch, draws random numbers that do not depend on the "
            f"sample, or reads an attribute that a hook or the step has set on another rank only. {_CUT}"
        )
    if layer > 0:
        norm = next(
            (part for part in layers[layer - 1].modules() if isinstance(part, BatchNorm) and part.training), None
        )
        if norm is not None:
            return f"layer {layer - 1} holds a {type(norm).__name__}, which uses other samples of the batch. {_CUT}"
        return (
            f"layer {layer - 1} gets the same input but returns a different result: it uses other samples of the "
            "batch, draws random numbers that do not depend on the sample, reads an attribute that a hook, the step or "
            f"another layer has set on another rank only, or its output is changed in place by other code. {_CUT}"
        )
    reasons = []
    if difference.several:
        reasons.append(
            "code before the layers uses other samples of the batch (a mean over samples, sorting, arange(len(x))) or "
            "random numbers that do not depend on the sample, and runs for each micro-batch"
        )
    if difference.number:
        reasons.append(
            "it reads an attribute, buffer or list that the last batch, a hook or the code after the layers has set, "
            "which does not reach the first stage"
        )
    return f"{', or '.join(reasons) or 'code before the layers depends on the process'}. {_CUT}"


def place_of(difference: Difference, names: Sequence[str] = ()) -> str:
    """Return a description of the place of a difference, for a sentence."""
    phase, layer, name = difference.key
    inside = "" if layer == OUTSIDE or names else f"layer {layer}, "
    called = repr(names[layer]) if names and layer != OUTSIDE else f"layer {layer}"
    return {
        Phase.BATCH: "the batch that training_step receives",
        Phase.MODE: f"{inside}the mode of {name or 'the module'}",
        Phase.FROZEN: f"{inside}requires_grad of {name}",
        Phase.INPUT: f"the input of {called} ({name})",
        Phase.OUTPUT: f"the output of {called} ({name})",
        Phase.LOSS: "the loss" if name == "loss" else f"the value that training_step returns as {name!r}",
        Phase.GRADIENT: f"{inside}the gradient of {name} after backward",
        Phase.STEP_GRADIENT: f"{inside}the gradient of {name} that the optimizer gets",
        Phase.SETTING: name,
        Phase.WEIGHT: f"{inside}the weight {name} after the batch",
        Phase.BUFFER: f"{inside}the buffer {name} after the batch",
        Phase.LOG: f"the logged value {name}",
    }[phase]


def describe_difference(
    difference: Difference, notes: Sequence[str], layers: Sequence[Any], names: Sequence[str] = ()
) -> str:
    """Return a description of a difference, its place, and its likely reason.

    The arguments are as in `likely_reason`.
    """
    where = f"on rank {difference.rank}" + (f" ({difference.where})" if difference.where else "")
    return (
        f"batch {difference.number} differs from one plain process. The first difference is in "
        f"{place_of(difference, names)}, {where}: {difference.ours} here, {difference.theirs} in one process. "
        f"Likely reason: {likely_reason(difference, notes, layers, names)}"
    )


def describe_mixing(difference: Difference, names: Sequence[str]) -> str:
    """Return a description of a difference between a whole batch and its micro-batches, with its likely reason.

    Args:
        difference: the difference. Its `ours` belongs to the micro-batches, and its `theirs` to the whole batch.
        names: the paths of the layers.
    """
    reason = MIXING_REASONS[difference.key.phase]
    return (
        f"In batch {difference.number}, {place_of(difference, names)}{difference.where and f' ({difference.where})'} "
        f"is {difference.ours} for the micro-batches together, and {difference.theirs} for the whole batch. Likely "
        f"reason: {reason}. {_CUT}"
    )


FINDINGS_VARIABLE = "LIGHTNING_PIPES_VERIFY_FINDINGS"
"""The environment variable that names the file of the results.

If it is set, training ends after the compared batches.
"""


@dataclass(frozen=True)
class ComparisonResult:
    """The result of one comparison, with a sentence that describes it."""

    equal: bool
    text: str


def save_finding(finding: ComparisonResult) -> None:
    """Append a result to the file of the results, if there is one."""
    path = os.environ.get(FINDINGS_VARIABLE)
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(finding)) + "\n")


def load_findings(path: Path) -> list[ComparisonResult]:
    """Return the results in a file, or an empty list if the file does not exist."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [ComparisonResult(**json.loads(line)) for line in lines]


def is_awaited() -> bool:
    """Return whether a command waits for the result only, so that training can end after it."""
    return bool(os.environ.get(FINDINGS_VARIABLE))
