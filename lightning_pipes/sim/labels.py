"""Labels of events."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipes.ir import Instruction, Kind, Plan
from lightning_pipes.sim.event import Event

WORDS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradients",
    Kind.W: "weight gradients",
    Kind.STEP: "step",
}


class Labels:
    """Micro-batch numbers, with job and batch where the events have several."""

    def __init__(self, plan: Plan, events: Sequence[Event]) -> None:
        self._plan = plan
        items = [(e.instruction.job, e.instruction.batch) for e in events]
        self._jobs = any(job for job, _ in items)
        self._batches = any(batch for _, batch in items)

    def label_of(self, i: Instruction) -> str:
        """`3` is the fourth micro-batch, `3'` on its rank's second stage, `b3` of job 1, `2.3` of batch 2."""
        if i.kind is Kind.STEP:
            return "S"
        spans = self._plan.spans(i.kind, i.stage, i.job)
        number = str(spans.index(i.span)) if i.span in spans else f"{i.span.start}:{i.span.stop}"
        if self._batches:
            number = str(i.batch) if len(spans) == 1 else f"{i.batch}.{number}"
        if self._jobs:
            letter = chr(ord("a") + i.job) if i.job < 26 else f"j{i.job}:"
            number = letter if len(spans) == 1 and not self._batches else letter + number
        return number + "'" * self.stage_index(i)

    def stage_index(self, i: Instruction) -> int:
        """Which of its rank's stages `i` concerns, from 0."""
        return self._plan.stages[self._plan.ranks[i.stage]].index(i.stage)
