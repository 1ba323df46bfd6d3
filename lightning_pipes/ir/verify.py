"""Proof that a program is a correct order of its plan, before anything runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lightning_pipes.ir.deadlock import deadlock
from lightning_pipes.ir.dependencies import needs
from lightning_pipes.ir.errors import PlanError, ProgramError
from lightning_pipes.ir.instruction import COMPUTE, Instruction, Kind
from lightning_pipes.ir.lowering import lower, window
from lightning_pipes.ir.plan import Plan
from lightning_pipes.ir.program import Program


@dataclass(frozen=True)
class Facts:
    """The facts that `verify` learned, per stage.

    Attributes:
        peak_spans: most forward spans held at once between F and B.
        peak_rows: most samples held at once between F and B.
        versions: most weight versions that live at once.
        staleness: most updates that a stage makes between a batch's F and its STEP, that one not counted.
    """

    peak_spans: tuple[int, ...]
    peak_rows: tuple[int, ...]
    versions: tuple[int, ...]
    staleness: tuple[int, ...]


def verify(program: Program, plan: Plan, batches: int | None = None) -> Facts:
    """Facts about a program that holds: complete, paired, free of deadlock, within versions and limits.

    An endless program is unrolled to `batches` batches, by default three more than its head begins.

    Raises:
        ProgramError: an instruction is missing, twice, on the wrong rank, or a message is sent but not received.
        DeadlockError: ranks wait for each other.
        PlanError: a stage needs more weight versions or holds more samples than the plan allows.
    """
    least = plan.batches
    if program.endless:
        least = batches if batches is not None else program.head_batches + 3
        program = program.unroll(least)
    lowered = lower(program, plan)
    _check_complete(lowered, plan, least)
    order = _run(lowered, plan)
    facts = _facts(order, plan)
    for stage in range(plan.n_stages):
        if facts.versions[stage] > plan.versions[stage] and plan.shared_weights:
            raise PlanError(
                f"stage {stage} needs {facts.versions[stage]} weight versions and may hold {plan.versions[stage]}; "
                "raise versions or run its STEP after the backward of every batch in flight"
            )
        if plan.limits and facts.peak_rows[stage] > plan.limits[stage]:
            raise PlanError(
                f"stage {stage} holds {facts.peak_rows[stage]} samples between F and B and may hold "
                f"{plan.limits[stage]}; start fewer forwards before its first backward, or raise the limit"
            )
    return facts


def _check_complete(program: Program, plan: Plan, least: int) -> None:
    batches = {(i.job, i.batch) for i in program.instructions()}
    for job in range(len(plan.jobs)):
        most = max((batch + 1 for j, batch in batches if j == job), default=0)
        for batch in range(max(least, most)):
            if (job, batch) not in batches:
                raise ProgramError(f"job {job} has no batch {batch} in the program")
    for rank, row in enumerate(program.head):
        wanted = Counter(i for job, batch in sorted(batches) for i in window(plan, rank, job, batch))
        got = Counter(row)
        for i in sorted(got - wanted, key=lambda i: i.kind not in COMPUTE):  # its transfers follow from it
            why = "comes more than once" if i in wanted else "does not belong there"
            raise ProgramError(f"rank {rank}: {i} {why}")
        for i in wanted - got:
            raise ProgramError(f"rank {rank}: {i} is missing")


def _run(program: Program, plan: Plan) -> list[Instruction]:
    """One order in which all ranks together can run the program."""
    done: dict[Instruction, None] = {}
    at = [0] * program.n_ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(program.head):
            while at[rank] < len(row) and all(n in done for n in needs(row[at[rank]], plan)):
                done[row[at[rank]]] = None
                at[rank] += 1
                moved = True
    stuck = {rank: row[at[rank]] for rank, row in enumerate(program.head) if at[rank] < len(row)}
    if stuck:
        raise deadlock(done, stuck, plan)
    return list(done)


def _facts(order: list[Instruction], plan: Plan) -> Facts:
    n = plan.n_stages
    peak_spans, peak_rows, versions, staleness = [0] * n, [0] * n, [1] * n, [0] * n
    held: list[dict[Instruction, int]] = [{} for _ in range(n)]  # forward -> samples without backward yet
    updates: list[Counter[int]] = [Counter() for _ in range(n)]  # by job
    read: list[dict[tuple[int, int], int]] = [{} for _ in range(n)]  # (job, batch) -> oldest version in use
    for i in order:
        s, item = i.stage, (i.job, i.batch)
        if i.kind is Kind.F:
            held[s][i] = i.span.rows
            read[s].setdefault(item, updates[s][i.job])
            peak_spans[s] = max(peak_spans[s], len(held[s]))
            peak_rows[s] = max(peak_rows[s], sum(held[s].values()))
        elif i.kind is Kind.B or i.kind is Kind.W:
            for span in plan.overlapping(Kind.F, s, i.job, i.span):
                forward = Instruction(Kind.F, s, i.job, i.batch, span)
                held[s][forward] -= min(span.stop, i.span.stop) - max(span.start, i.span.start)
                if not held[s][forward]:
                    del held[s][forward]
        elif i.kind is Kind.STEP:
            staleness[s] = max(staleness[s], updates[s][i.job] - read[s].pop(item))
            updates[s][i.job] += 1
            oldest = min((v for (job, _), v in read[s].items() if job == i.job), default=updates[s][i.job])
            versions[s] = max(versions[s], updates[s][i.job] - oldest + 1)
    return Facts(tuple(peak_spans), tuple(peak_rows), tuple(versions), tuple(staleness))
