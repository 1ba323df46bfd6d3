"""Recomputations in the bubbles of a step (Mario, Liu et al. 2025, PPoPP)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import Instruction, Kind, Plan, Program, add_recomputations
from lightning_pipes.planning.memory import peak_bytes, row_peak
from lightning_pipes.sim import makespan, simulate

MAX_PASSES = 8
"""The maximum number of simulations with which recomputations are placed within given limits."""
MAX_PLACED_INSTRUCTIONS = 2**11
"""The size of a program above which recomputations stay directly before their gradients."""
MIN_STEP_GAIN = 0.01
"""The share of a step that has to be saved by holding the activations of one more micro-batch."""


def place_recomputations(program: Program, plan: Plan, costs: CostModel, memory: Sequence[int | None] = ()) -> Program:
    """Return the program with recomputations in the earliest bubbles that the memory of the ranks allows.

    At first, each R is placed directly before the gradient of its backward. It then moves to an earlier wait of its
    rank if it fits into it, so that no instruction starts later. Ranks hold the activations of as few further
    micro-batches as possible: each of them must make the step noticeably shorter.

    Args:
        program: a program without transfers. An endless program is returned with each R before its gradient.
        plan: the plan of the program.
        costs: the seconds and bytes of its stages.
        memory: the bytes of each rank. If they are None or missing, the rank may hold no more than without the moves.
    """
    best = program = add_recomputations(program, plan)
    if program.is_endless or program.size > MAX_PLACED_INSTRUCTIONS or not plan.early_recompute:
        return program
    peaks = peak_bytes(program, plan, costs)
    most = [*peaks]
    for rank, size in enumerate(memory):
        most[rank] = peaks[rank] if size is None else max(peaks[rank], size)
    again = [[costs.memory_change(i, plan)[0] for i in row if i.kind is Kind.R] for row in program.head]
    shortest = makespan(program, plan, costs)
    for further in count():
        wanted = [peak + further * max(sizes, default=0) for peak, sizes in zip(peaks, again, strict=True)]
        limits = [min(pair) for pair in zip(wanted, most, strict=True)]
        found = _place_within(program, plan, costs, limits)
        span = makespan(found, plan, costs)
        if span < (1 - MIN_STEP_GAIN) * shortest:
            best, shortest = found, span
        elif further:
            break
        if limits == most:
            break
    return best


def _place_within(program: Program, plan: Plan, costs: CostModel, limits: Sequence[int]) -> Program:
    for _ in range(MAX_PASSES):
        rows = _fill_waits(program, plan, costs, limits)
        if rows == program.head:
            break
        program = Program(rows)
    return program


def _fill_waits(
    program: Program, plan: Plan, costs: CostModel, limits: Sequence[int]
) -> tuple[tuple[Instruction, ...], ...]:
    """Return the rows of the program, in which each wait contains the next recomputations that fit into it."""
    times = {e.instruction: (e.start, e.end) for e in simulate(program, plan, costs).computations}
    rows = []
    for rank, given in enumerate(program.head):
        row, free, at = list(given), 0, 0
        while at < len(row):
            start, end = times[row[at]]
            wait = start - costs.overhead_ns - free
            moved = _next_recomputation(row, at, wait, plan, costs) if wait > 0 else None
            changed = row if moved is None else [*row[:at], row[moved], *row[at:moved], *row[moved + 1 :]]
            if moved is None or row_peak(changed, rank, plan, costs) > limits[rank]:
                free, at = end, at + 1
            else:
                free += costs.overhead_ns + costs.duration_ns(row[moved], plan)
                row, at = changed, at + 1
        rows.append(tuple(row))
    return tuple(rows)


def _next_recomputation(row: Sequence[Instruction], at: int, wait: int, plan: Plan, costs: CostModel) -> int | None:
    """Return the position of the first later R that may run before position `at` and fits into the wait, if any."""
    if row[at].kind is Kind.R:
        return None
    later = set[tuple[int, int, int, int]]()
    for n in range(at, len(row)):
        i = row[n]
        if i.kind is Kind.F:
            later.add((i.job, i.batch, i.stage, i.span.start))
        elif i.kind is Kind.R:
            runs = plan.overlapping_spans(Kind.F, i.stage, i.job, i.span)
            ran = not any((i.job, i.batch, i.stage, span.start) in later for span in runs)
            return n if ran and costs.overhead_ns + costs.duration_ns(i, plan) <= wait else None
    return None
