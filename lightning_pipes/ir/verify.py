"""Verification that a program is a correct order of its plan before it runs, and drawings of deadlocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields

from lightning_pipes.ir.checks import DeadlockError, PlanError, ProgramError
from lightning_pipes.ir.dependencies import needs
from lightning_pipes.ir.instruction import COMPUTE_KINDS, RECEIVE_KINDS, Instruction, Kind, send_of
from lightning_pipes.ir.lowering import add_recomputations, batch_instructions, lower
from lightning_pipes.ir.plan import Plan
from lightning_pipes.ir.program import Program
from lightning_pipes.ir.regular import IrregularError, Unit, is_regular, walk_program

MAX_DRAWN_STEPS = 6
"""The number of steps that a drawing shows."""


def deadlock_error(
    done: Iterable[Instruction], stuck: Mapping[int, Instruction], plan: Plan, why: str = ""
) -> DeadlockError:
    """Return an error for ranks that wait for each other, with a drawing of the finished instructions.

    Args:
        done: the finished instructions, in a valid order.
        stuck: the next instruction of each rank that has not finished.
        plan: the plan of the program.
        why: a sentence that explains the reason, if it is known.
    """
    ran = dict.fromkeys(done)
    waits = []
    for rank, i in sorted(stuck.items()):
        missing = ", ".join(str(n) for n in needs(i, plan) if n not in ran)
        waits.append(f"rank {rank} waits at {i} for {missing}")
    begin = f"{why}. The ranks" if why else "the ranks"
    return DeadlockError(f"{begin} wait for each other: {'; '.join(waits)}; operations so far:\n{draw_grid(ran, plan)}")


def draw_grid(done: Iterable[Instruction], plan: Plan) -> str:
    """Return a drawing of the latest steps, with one row per rank and one column per step.

    Args:
        done: the finished instructions, in a valid order. Receives may be omitted if their sends are included.
        plan: the plan of the program.
    """
    steps: dict[Instruction, int] = {}
    last = [-1] * plan.n_ranks
    for i in done:
        rank, before = plan.rank_of(i), max([-1, *(steps.get(n, _find_send(n, steps)) for n in needs(i, plan))])
        if i.kind in COMPUTE_KINDS:
            last[rank] = steps[i] = 1 + max(last[rank], before)
        else:
            steps[i] = before  # a message does not occupy a step
    first = max(0, max(last) + 1 - MAX_DRAWN_STEPS)
    cells = {(plan.rank_of(i), step): str(i) for i, step in steps.items() if i.kind in COMPUTE_KINDS and step >= first}
    columns = range(first, max(last) + 1)
    widths = [max(len(text) for (_, at), text in cells.items() if at == step) for step in columns]
    rows = []
    for rank in range(plan.n_ranks):
        row = " ".join(cells.get((rank, at), "").ljust(width) for at, width in zip(columns, widths, strict=True))
        rows.append(f"rank {rank} | {'... ' if first else ''}{row}".rstrip())
    return "\n".join(rows)


def _find_send(i: Instruction, steps: Mapping[Instruction, int]) -> int:
    """Return the step after which the message of the receive `i` was sent, or -1 if there is no such message."""
    return steps.get(send_of(i), -1) if i.kind in RECEIVE_KINDS else -1


_OTHER_PLAN_WAY_OUT = "this program was made for another plan; make one with schedule.program(plan) for this plan"


def check_program_matches_plan(program: Program, plan: Plan) -> None:
    """Check that every instruction of a finite program belongs to the plan and is on the rank that the plan assigns.

    Missing instructions are not detected.

    Raises:
        ProgramError: if an instruction does not match. The message names it and the corresponding entry of the plan.
    """
    if program.n_ranks != plan.n_ranks:
        raise ProgramError(
            f"the program has {program.n_ranks} rows, but the plan has {plan.n_ranks} ranks; {_OTHER_PLAN_WAY_OUT}"
        )
    known: dict[tuple[Kind, int, int], frozenset[object]] = {}
    for rank, row in enumerate(program.head):
        for i in row:
            key = i.kind, i.stage, i.job
            if key not in known:
                why = _describe_mismatch(i, rank, plan)
                if why:
                    raise ProgramError(f"rank {rank} has {i}, and {why}; {_OTHER_PLAN_WAY_OUT}")
                known[key] = frozenset(plan.spans(*key))
                if i.kind is Kind.R:
                    known[key] -= plan.kept_spans(i.stage, i.job)
            if i.kind is not Kind.STEP and i.span not in known[key]:
                cut = f"the plan cuts {i.kind}{i.stage} into {_describe_cut(i, plan)}"
                if i.span in plan.spans(*key):
                    cut = f"stage {i.stage} of the plan keeps the activations of this micro-batch"
                raise ProgramError(f"rank {rank} has {i}, but {cut}; {_OTHER_PLAN_WAY_OUT}")
            if plan.rank_of(i) != rank:
                raise ProgramError(
                    f"rank {rank} has {i}, and {_describe_mismatch(i, rank, plan)}; {_OTHER_PLAN_WAY_OUT}"
                )


def describe_absent_needs(program: Program, plan: Plan, waiting: Collection[Instruction]) -> str:
    """Return a sentence about the needs of `waiting` that no rank runs, or an empty string if there are none."""
    there = set(program.iter_instructions())
    never = [n for i in waiting for n in needs(i, plan) if (send_of(n) if n.kind in RECEIVE_KINDS else n) not in there]
    if not never:
        return ""
    return f"no rank has {', '.join(map(str, never[:4]))}{', ...' if never[4:] else ''}; {_OTHER_PLAN_WAY_OUT}"


def _describe_mismatch(i: Instruction, rank: int, plan: Plan) -> str:
    if i.stage >= plan.n_stages:
        return f"the plan has {plan.n_stages} stages, counted from 0"
    if i.job >= len(plan.jobs):
        return f"the plan has {len(plan.jobs)} jobs, counted from 0"
    if rank not in plan.ranks_of_stages[i.stage]:
        return f"the plan has stage {i.stage} on rank {', '.join(map(str, plan.ranks_of_stages[i.stage]))}"
    sends = i.kind in (Kind.SF, Kind.RB)
    other = i.stage + 1 if sends else i.stage - 1
    if i.kind in (Kind.SF, Kind.RF, Kind.SB, Kind.RB) and not 0 <= other < plan.n_stages:
        return f"stage {i.stage} of the plan has no neighboring stage for it"
    return ""


def _describe_cut(i: Instruction, plan: Plan) -> str:
    spans = plan.spans(i.kind, i.stage, i.job)
    return f"{len(spans)} micro-batches of a batch of {plan.jobs[i.job].rows}"


@dataclass(frozen=True)
class ProgramStats:
    """Statistics of a verified program. Each attribute has one entry per stage.

    Attributes:
        peak_spans: the maximum number of forward spans between F and B at the same time.
        peak_rows: the maximum number of samples between F and B at the same time.
        versions: the maximum number of weight versions that exist at the same time.
        staleness: the maximum number of updates between the first F of a batch and its STEP, not counting that STEP.
    """

    peak_spans: tuple[int, ...]
    peak_rows: tuple[int, ...]
    versions: tuple[int, ...]
    staleness: tuple[int, ...]


def verify(program: Program, plan: Plan, batches: int | None = None) -> ProgramStats:
    """Check that a program is complete, paired, free of deadlocks, and within the limits of its plan.

    Args:
        program: the program to check.
        plan: the plan that the program orders.
        batches: the number of batches to which an endless program is unrolled. The default is three more than the
            number of batches that start in its head.

    Returns:
        The statistics of the program.

    Raises:
        ProgramError: if an instruction is missing, duplicated or on the wrong rank, or if a message is sent but not
            received.
        DeadlockError: if ranks wait for each other.
        PlanError: if a stage needs more weight versions or holds more samples than the plan allows.
    """
    least = plan.batches
    if program.is_endless:
        least = batches if batches is not None else program.head_batches + 3
        program = program.unroll(least)
    facts = _regular_stats(program, plan, least)
    if facts is None:
        _check_known(program, plan)
        lowered = lower(program, plan)
        _check_complete(lowered, plan, least)
        order = _run(lowered, plan)
        facts = _most_of_ranks(order, plan)
    for stage in range(plan.n_stages):
        if facts.versions[stage] > plan.versions[stage] and plan.shared_weights:
            raise PlanError(
                f"stage {stage} needs {facts.versions[stage]} weight versions, but may hold {plan.versions[stage]}; "
                "raise versions or run its STEP after the backward of every batch in flight"
            )
        if plan.limits and facts.peak_rows[stage] > plan.limits[stage]:
            raise PlanError(
                f"stage {stage} holds {facts.peak_rows[stage]} samples between F and B, but may hold "
                f"{plan.limits[stage]}; start fewer forwards before its first backward, or raise the limit"
            )
    return facts


def _regular_stats(program: Program, plan: Plan, least: int) -> ProgramStats | None:
    """Return the statistics of a correct program of a regular plan without transfers, or None for any other program.

    Transfers need no check because `lower` derives them from the computations. The statistics of a stage depend only on
    the order of its rank.
    """
    if not is_regular(program, plan):
        return None
    n = plan.n_stages
    spans, rows, peak_spans, peak_rows = [0] * n, [0] * n, [0] * n, [0] * n
    ends = _Ends.from_plan(plan)
    units: dict[tuple[Kind, int, int, int], Unit] = {}
    last = Kind.W if plan.split_backward else Kind.B
    try:
        for _, i, unit, _ in walk_program(add_recomputations(program, plan), plan):
            kind, s, job, batch, (start, stop) = i
            if unit.note is None:
                unit.note = units[unit.key] = unit
                if kind is Kind.F:
                    ends.begin_batch(s, job, batch)
            if kind is Kind.F:
                spans[s] += 1
                rows[s] += stop - start
                if spans[s] > peak_spans[s]:
                    peak_spans[s] = spans[s]
                if rows[s] > peak_rows[s]:
                    peak_rows[s] = rows[s]
            elif kind is last:
                spans[s] -= 1
                rows[s] -= stop - start
            elif kind is Kind.STEP:
                ends.step(s, job, batch)
    except IrregularError:
        return None
    if any(0 in unit.ran for unit in units.values()) or units.keys() != _required_units(units, plan, least):
        return None
    return ProgramStats(tuple(peak_spans), tuple(peak_rows), tuple(ends.versions), tuple(ends.staleness))


def _required_units(
    units: Collection[tuple[Kind, int, int, int]], plan: Plan, least: int
) -> set[tuple[Kind, int, int, int]]:
    """Return the (kind, stage, job, batch) keys of the complete program that contains these units."""
    batches = [least] * len(plan.jobs)
    for _, _, job, batch in units:
        batches[job] = max(batches[job], batch + 1)
    return {
        (kind, stage, job, batch)
        for job, count in enumerate(batches)
        for batch in range(count)
        for stage in range(plan.n_stages)
        for kind in (*plan.kinds_of_stage(stage), Kind.STEP)
    }


def _check_known(program: Program, plan: Plan) -> None:
    for rank, row in enumerate(program.head):
        for i in row:
            if not (0 <= i.stage < plan.n_stages and 0 <= i.job < len(plan.jobs)):
                raise ProgramError(f"rank {rank}: {i} does not belong there")


def _check_complete(program: Program, plan: Plan, least: int) -> None:
    batches = {(i.job, i.batch) for i in program.iter_instructions()}
    for job in range(len(plan.jobs)):
        most = max((batch + 1 for j, batch in batches if j == job), default=0)
        for batch in range(max(least, most)):
            if (job, batch) not in batches:
                raise ProgramError(f"job {job} has no batch {batch} in the program")
    for rank, row in enumerate(program.head):
        wanted = Counter(i for job, batch in sorted(batches) for i in batch_instructions(plan, rank, job, batch))
        got = Counter(row)
        for i in sorted(got - wanted, key=lambda i: i.kind not in COMPUTE_KINDS):  # computations before their transfers
            why = "comes more than once" if i in wanted else "does not belong there"
            raise ProgramError(f"rank {rank}: {i} {why}")
        for i in wanted - got:
            raise ProgramError(f"rank {rank}: {i} is missing")


def _run(program: Program, plan: Plan) -> list[Instruction]:
    """Return one valid order in which the ranks can run the program together."""
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
        raise deadlock_error(done, stuck, plan)
    return list(done)


@dataclass
class _Ends:
    """The weight versions that exist on each stage while batches begin and end there.

    Attributes:
        versions, staleness: for each stage, as in `ProgramStats`.
        updates: for each stage, the number of updates per job.
        read: for each stage, the version that each batch in flight reads, by (job, batch).
    """

    versions: list[int]
    staleness: list[int]
    updates: list[Counter[int]]
    read: list[dict[tuple[int, int], int]]

    @classmethod
    def from_plan(cls, plan: Plan) -> _Ends:
        n = plan.n_stages
        return cls([1] * n, [0] * n, [Counter() for _ in range(n)], [{} for _ in range(n)])

    def begin_batch(self, s: int, job: int, batch: int) -> None:
        self.read[s].setdefault((job, batch), self.updates[s][job])

    def step(self, s: int, job: int, batch: int) -> None:
        read, updates = self.read[s], self.updates[s]
        self.staleness[s] = max(self.staleness[s], updates[job] - read.pop((job, batch)))
        updates[job] += 1
        oldest = min((v for (other, _), v in read.items() if other == job), default=updates[job])
        self.versions[s] = max(self.versions[s], updates[job] - oldest + 1)


def _most_of_ranks(order: list[Instruction], plan: Plan) -> ProgramStats:
    """Return the statistics of each stage, as the maximum over its ranks."""
    if not plan.replicas:
        return _compute_stats(order, plan)
    rows: list[list[Instruction]] = [[] for _ in range(plan.n_ranks)]
    for i in order:
        rows[plan.rank_of(i)].append(i)
    stats = [_compute_stats(row, plan) for row in rows]
    names = [f.name for f in fields(ProgramStats)]
    return ProgramStats(
        *(tuple(map(max, zip(*(getattr(each, name) for each in stats), strict=True))) for name in names)
    )


def _compute_stats(order: list[Instruction], plan: Plan) -> ProgramStats:
    n = plan.n_stages
    peak_spans, peak_rows = [0] * n, [0] * n
    held: list[dict[Instruction, int]] = [{} for _ in range(n)]  # samples that each forward holds
    rows = [0] * n  # number of samples in `held`
    ends = _Ends.from_plan(plan)
    for i in order:
        s = i.stage
        if i.kind is Kind.F:
            held[s][i] = i.span.rows
            rows[s] += i.span.rows
            ends.begin_batch(s, i.job, i.batch)
            peak_spans[s] = max(peak_spans[s], len(held[s]))
            peak_rows[s] = max(peak_rows[s], rows[s])
        elif i.kind is Kind.B or i.kind is Kind.W:
            for span in plan.overlapping_spans(Kind.F, s, i.job, i.span):
                forward = Instruction(Kind.F, s, i.job, i.batch, span)
                freed = min(span.stop, i.span.stop) - max(span.start, i.span.start)
                held[s][forward] -= freed
                rows[s] -= freed
                if not held[s][forward]:
                    del held[s][forward]
        elif i.kind is Kind.STEP:
            ends.step(s, i.job, i.batch)
    return ProgramStats(tuple(peak_spans), tuple(peak_rows), tuple(ends.versions), tuple(ends.staleness))
