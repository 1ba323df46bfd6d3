"""Instructions: the smallest units of work of a rank."""

# ruff: noqa: N802 - the field's letters

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple


class Span(NamedTuple):
    """Samples `start` to `stop` (exclusive) of a batch, counted along axis 0.

    Spans, not micro-batch numbers, address samples, so that stages, directions and links may cut a batch differently.
    """

    start: int
    stop: int

    @property
    def rows(self) -> int:
        """The number of samples."""
        return self.stop - self.start

    def overlaps(self, other: Span) -> bool:
        """Return whether both share a sample."""
        return self.start < other.stop and other.start < self.stop

    def clip_to(self, rows: int) -> Span:
        """Return the part of this span inside a batch of `rows` samples; empty where the batch is too short."""
        return self if self.stop <= rows else Span(min(self.start, rows), rows)


def even_spans(rows: int, pieces: int) -> tuple[Span, ...]:
    """Return `pieces` spans that cover `rows` samples in order; sizes differ by one at most, larger ones are spread."""
    return tuple(Span(i * rows // pieces, (i + 1) * rows // pieces) for i in range(pieces))


class Kind(StrEnum):
    """The kind of work that an instruction does. The value is its text form."""

    F = "F"
    """Forward."""
    B = "B"
    """Full backward: input and weight gradients."""
    I = "I"  # noqa: E741 - the field's letter
    """Input gradients only; a W of the same span follows."""
    W = "W"
    """Weight gradients only."""
    STEP = "STEP"
    """The gradients of a batch are complete: update the stage's weights."""
    SF = "SF"
    """Send an activation to the next stage."""
    RF = "RF"
    """Receive the activation that the previous stage sent."""
    SB = "SB"
    """Send a gradient to the previous stage."""
    RB = "RB"
    """Receive the gradient that the next stage sent."""

    __hash__ = str.__hash__  # Enum's own is a Python call, and instructions are hashed by the thousand


_MEANING = {
    Kind.F: "forward of stage {}",
    Kind.B: "backward of stage {}",
    Kind.I: "input gradients of stage {}",
    Kind.W: "weight gradients of stage {}",
    Kind.STEP: "optimizer step of stage {}",
    Kind.SF: "activation sent by stage {}",
    Kind.RF: "activation for stage {}",
    Kind.SB: "gradient sent by stage {}",
    Kind.RB: "gradient for stage {}",
}
COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.STEP})
RECOMPUTES = frozenset({Kind.B, Kind.I})
"""Either runs the forward again where a stage recomputes."""
SENDS = frozenset({Kind.SF, Kind.SB})
RECEIVES = frozenset({Kind.RF, Kind.RB})

NO_SPAN = Span(0, 0)


class Instruction(NamedTuple):
    """`kind` on `stage`, for the samples `span` of batch number `batch` of job `job`.

    `batch` counts from the start of the window, the batches between two flushes. A STEP steps by the whole batch: its
    span is empty.
    """

    kind: Kind
    stage: int
    job: int = 0
    batch: int = 0
    span: Span = NO_SPAN

    def __str__(self) -> str:
        place = f"j{self.job}:" if self.job else ""
        number = f"@{self.batch}" if self.batch else ""
        samples = "" if self.kind is Kind.STEP else f"[{self.span.start}:{self.span.stop}]"
        return f"{place}{self.kind}{self.stage}{samples}{number}"

    def describe(self) -> str:
        """Return the text form with its meaning: `instruction F0[0:4] (forward of stage 0, samples 0 to 3)`."""
        samples = "" if self.kind is Kind.STEP else f", samples {self.span.start} to {self.span.stop - 1}"
        return f"instruction {self} ({_MEANING[self.kind].format(self.stage)}{samples})"


def F(stage: int, span: Span, job: int = 0, batch: int = 0) -> Instruction:
    """Return the forward of `span` on `stage`."""
    return Instruction(Kind.F, stage, job, batch, span)


def B(stage: int, span: Span, job: int = 0, batch: int = 0) -> Instruction:
    """Return the full backward of `span` on `stage`."""
    return Instruction(Kind.B, stage, job, batch, span)


def I(stage: int, span: Span, job: int = 0, batch: int = 0) -> Instruction:  # noqa: E743
    """Return the input gradients of `span` on `stage`."""
    return Instruction(Kind.I, stage, job, batch, span)


def W(stage: int, span: Span, job: int = 0, batch: int = 0) -> Instruction:
    """Return the weight gradients of `span` on `stage`."""
    return Instruction(Kind.W, stage, job, batch, span)


def STEP(stage: int, job: int = 0, batch: int = 0) -> Instruction:
    """Return the optimizer step of `stage` for one batch."""
    return Instruction(Kind.STEP, stage, job, batch)


def target_stage(kind: Kind, stage: int) -> int:
    """Return the stage that a send of `kind` goes to from `stage`."""
    return stage + 1 if kind is Kind.SF else stage - 1


@lru_cache(maxsize=4096)  # asked for every message, and the same come with every batch
def receive_of(send: Instruction) -> Instruction:
    """Return the receive, on the neighbouring stage, that matches `send`."""
    if send.kind is Kind.SF:
        return send._replace(kind=Kind.RF, stage=send.stage + 1)
    return send._replace(kind=Kind.RB, stage=send.stage - 1)


@lru_cache(maxsize=4096)
def send_of(receive: Instruction) -> Instruction:
    """Return the send, on the neighbouring stage, that matches `receive`."""
    if receive.kind is Kind.RF:
        return receive._replace(kind=Kind.SF, stage=receive.stage - 1)
    return receive._replace(kind=Kind.SB, stage=receive.stage + 1)
