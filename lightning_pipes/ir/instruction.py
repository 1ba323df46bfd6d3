"""Instructions, the smallest units of work that a rank executes."""

# ruff: noqa: N802 - the field's letters

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple


class Span(NamedTuple):
    """A half-open range of samples of a batch, from `start` up to but excluding `stop`, along axis 0.

    Instructions address their samples by spans instead of micro-batch numbers. This allows stages, directions and links
    to cut the same batch differently.
    """

    start: int
    stop: int

    @property
    def rows(self) -> int:
        """The number of samples in the span."""
        return self.stop - self.start

    def overlaps(self, other: Span) -> bool:
        """Return whether the two spans have at least one sample in common."""
        return self.start < other.stop and other.start < self.stop

    def clip_to(self, rows: int) -> Span:
        """Return the part of this span that lies inside a batch of `rows` samples.

        The result is empty if the batch ends before this span starts.
        """
        return self if self.stop <= rows else Span(min(self.start, rows), rows)


def even_spans(rows: int, pieces: int) -> tuple[Span, ...]:
    """Return `pieces` spans that cover `rows` samples in order.

    The sizes of any two spans differ by at most one sample, and the larger spans are spread evenly among the others.
    """
    return tuple(Span(i * rows // pieces, (i + 1) * rows // pieces) for i in range(pieces))


class Kind(StrEnum):
    """The kind of work that an instruction does. The value of a member is its text form."""

    F = "F"
    """Forward."""
    R = "R"
    """Repeated forward, which creates the activations for the backward of a stage that recomputes them."""
    B = "B"
    """Full backward, which computes the gradients of both the inputs and the weights."""
    I = "I"  # noqa: E741 - the field's letter
    """Backward for the input gradients only; a W of the same span follows."""
    W = "W"
    """Backward for the weight gradients only."""
    STEP = "STEP"
    """Optimizer step of a stage, which runs after all gradients of the batch are complete."""
    SF = "SF"
    """Send an activation to the next stage."""
    RF = "RF"
    """Receive an activation from the previous stage."""
    SB = "SB"
    """Send a gradient to the previous stage."""
    RB = "RB"
    """Receive a gradient from the next stage."""

    __hash__ = str.__hash__  # faster than Enum.__hash__, which is written in Python


_KIND_DESCRIPTIONS = {
    Kind.F: "forward of stage {}",
    Kind.R: "recomputation of stage {}",
    Kind.B: "backward of stage {}",
    Kind.I: "input gradients of stage {}",
    Kind.W: "weight gradients of stage {}",
    Kind.STEP: "optimizer step of stage {}",
    Kind.SF: "activation sent by stage {}",
    Kind.RF: "activation for stage {}",
    Kind.SB: "gradient sent by stage {}",
    Kind.RB: "gradient for stage {}",
}
COMPUTE_KINDS = frozenset({Kind.F, Kind.R, Kind.B, Kind.I, Kind.W, Kind.STEP})
RECOMPUTE_KINDS = frozenset({Kind.B, Kind.I})
"""Kinds that need the activations of a stage, and therefore the recomputation if the stage does not keep them."""
SEND_KINDS = frozenset({Kind.SF, Kind.SB})
RECEIVE_KINDS = frozenset({Kind.RF, Kind.RB})

NO_SPAN = Span(0, 0)


class Instruction(NamedTuple):
    """An instruction of one `kind` on one stage, for some samples of one batch.

    Attributes:
        kind: the kind of work.
        stage: the stage that the instruction belongs to.
        job: the job that the batch belongs to.
        batch: the number of the batch, counted from the start of the window. A window contains the batches between two
            flushes.
        span: the samples of the batch. It is empty for a STEP, because a STEP uses the gradients of the whole batch. If
            a stage has several replicas, the empty span r:r marks the STEP of replica r.
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
        """Return the text form with its meaning, as in `instruction F0[0:4] (forward of stage 0, samples 0 to 3)`."""
        samples = "" if self.kind is Kind.STEP else f", samples {self.span.start} to {self.span.stop - 1}"
        return f"instruction {self} ({_KIND_DESCRIPTIONS[self.kind].format(self.stage)}{samples})"


def F(stage: int, span: Span, job: int = 0, batch: int = 0) -> Instruction:
    """Return the instruction that runs the forward of `span` on `stage`."""
    return Instruction(Kind.F, stage, job, batch, span)


def R(stage: int, span: Span, job: int = 0, batch: int = 0) -> Instruction:
    """Return the instruction that runs the forward of `span` on `stage` again to create its activations."""
    return Instruction(Kind.R, stage, job, batch, span)


def B(stage: int, span: Span, job: int = 0, batch: int = 0) -> Instruction:
    """Return the instruction that runs the full backward of `span` on `stage`."""
    return Instruction(Kind.B, stage, job, batch, span)


def I(stage: int, span: Span, job: int = 0, batch: int = 0) -> Instruction:  # noqa: E743
    """Return the instruction that computes the input gradients of `span` on `stage`."""
    return Instruction(Kind.I, stage, job, batch, span)


def W(stage: int, span: Span, job: int = 0, batch: int = 0) -> Instruction:
    """Return the instruction that computes the weight gradients of `span` on `stage`."""
    return Instruction(Kind.W, stage, job, batch, span)


def STEP(stage: int, job: int = 0, batch: int = 0) -> Instruction:
    """Return the instruction that runs the optimizer step of `stage` for one batch."""
    return Instruction(Kind.STEP, stage, job, batch)


def target_stage(kind: Kind, stage: int) -> int:
    """Return the stage that receives the message if `stage` runs a send of this kind."""
    return stage + 1 if kind is Kind.SF else stage - 1


@lru_cache(maxsize=4096)  # called for every message; the same messages return with every batch
def receive_of(send: Instruction) -> Instruction:
    """Return the receive on the neighboring stage that matches `send`."""
    if send.kind is Kind.SF:
        return send._replace(kind=Kind.RF, stage=send.stage + 1)
    return send._replace(kind=Kind.RB, stage=send.stage - 1)


@lru_cache(maxsize=4096)
def send_of(receive: Instruction) -> Instruction:
    """Return the send on the neighboring stage that matches `receive`."""
    if receive.kind is Kind.RF:
        return receive._replace(kind=Kind.SF, stage=receive.stage - 1)
    return receive._replace(kind=Kind.SB, stage=receive.stage + 1)
