"""Dependencies between instructions. This is the only module that defines them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from lightning_pipes.ir.instruction import Instruction, Kind, send_of
from lightning_pipes.ir.passes import recomputation_of
from lightning_pipes.ir.plan import Plan
from lightning_pipes.ir.stream import Transfer


class Reduction(NamedTuple):
    """The reduction of a batch's gradients on one stage, which sums them over the replicas of the pipeline."""

    stage: int
    batch: int
    job: int = 0


Need = Instruction | Transfer | Reduction
"""A condition that an instruction may wait for: an instruction, a layer transfer, or a gradient reduction."""


def needs(i: Instruction, plan: Plan) -> list[Instruction]:
    """Return the instructions, on any rank, that must have ended before `i` starts.

    If neighboring stages are on different ranks, a computation needs the message from the other stage, and the message
    needs the computation that produces its samples. If they are on the same rank, a computation directly needs the
    computation on the neighboring stage. `Plan.versions` describes the dependencies on updates of the weights.
    """
    kind, stage, job, batch, span = i
    out = list(plan.after.get(i, ())) if plan.after else []

    def add_overlapping(other: Kind, at: int) -> None:
        out.extend([Instruction(other, at, job, batch, s) for s in plan.overlapping_spans(other, at, job, span)])

    gradient = Kind.I if plan.split_backward else Kind.B
    if kind is Kind.F:
        if stage > 0:
            add_overlapping(*((Kind.RF, stage) if plan.is_remote_edge(stage - 1) else (Kind.F, stage - 1)))
        if batch >= plan.versions[stage] and plan.shared_weights:
            out.append(_step_before(i, plan, plan.versions[stage]))
    elif kind is Kind.R:
        add_overlapping(Kind.F, stage)
    elif kind is Kind.B or kind is Kind.I:
        add_overlapping(Kind.F, stage)
        if (recomputation := recomputation_of(i, plan)) is not None:
            out.append(recomputation)
        if stage + 1 < plan.n_stages:
            add_overlapping(*((Kind.RB, stage) if plan.is_remote_edge(stage) else (gradient, stage + 1)))
        if batch > 0 and kind is Kind.B and plan.shared_weights:  # don't add the gradients of two batches
            out.append(_step_before(i, plan))
    elif kind is Kind.SF:
        add_overlapping(Kind.F, stage)
    elif kind is Kind.RF:
        out.append(send_of(i))
    elif kind is Kind.SB:
        add_overlapping(gradient, stage)
    elif kind is Kind.RB:
        out.append(send_of(i))
    elif kind is Kind.W:
        out.append(Instruction(Kind.I, stage, job, batch, span))
        if batch > 0 and plan.shared_weights:
            out.append(_step_before(i, plan))
    else:  # a STEP needs all gradients of its batch and the previous STEP
        last = Kind.W if plan.split_backward else Kind.B
        out.extend([Instruction(last, stage, job, batch, s) for s in plan.spans(last, stage, job)])
        if batch > 0 and plan.shared_weights:
            out.append(_step_before(i, plan))
    return out


def _step_before(i: Instruction, plan: Plan, batches: int = 1) -> Instruction:
    """Return the STEP of the stage of `i`, `batches` batches earlier, on the rank that runs `i`."""
    return Instruction(Kind.STEP, i.stage, i.job, i.batch - batches, plan.step_span(i))


class DependencyTracker:
    """Track which instructions are ready while other instructions complete.

    A need that was never added counts as unmet until it is passed to `complete`. A rank can therefore add only its own
    instructions and report the arrival of messages with `complete`. Use `forget_batch` to free the records of finished
    batches.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._waiting: dict[Instruction, int] = {}
        self._dependents: dict[Need, list[Instruction]] = {}
        self._done: defaultdict[tuple[int, int], set[Need]] = defaultdict(set)  # by job and batch

    def add(
        self, instructions: Iterable[Instruction], waits: Mapping[Instruction, Sequence[Need]] | None = None
    ) -> list[Instruction]:
        """Add instructions and return the instructions among them that are ready immediately.

        Args:
            instructions: the instructions to track.
            waits: further needs of some of these instructions, in addition to the result of `needs`.
        """
        ready = []
        for i in instructions:
            wanted: list[Need] = [*needs(i, self.plan)]
            if waits:
                wanted += waits.get(i, ())
            unmet = [n for n in wanted if not self._is_done(n)]
            for n in unmet:
                self._dependents.setdefault(n, []).append(i)
            if unmet:
                self._waiting[i] = len(unmet)
            else:
                ready.append(i)
        return ready

    def complete(self, i: Need) -> list[Instruction]:
        """Record that `i` has ended and return the instructions that become ready as a result."""
        self._done[i.job, i.batch].add(i)
        ready = []
        for dependent in self._dependents.pop(i, ()):
            self._waiting[dependent] -= 1
            if not self._waiting[dependent]:
                del self._waiting[dependent]
                ready.append(dependent)
        return ready

    def unmet_needs(self, i: Instruction) -> list[Instruction]:
        """Return the instructions that the plan requires before `i` and that have not ended."""
        return [n for n in needs(i, self.plan) if not self._is_done(n)]

    def forget_batch(self, job: int, batch: int) -> None:
        """Remove the records of a batch that has ended and that no later instruction needs."""
        self._done.pop((job, batch), None)

    def _is_done(self, i: Need) -> bool:
        return i in self._done.get((i.job, i.batch), ())
