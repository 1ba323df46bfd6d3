"""What no order of an array's blocks can beat."""

from __future__ import annotations

from lightning_pipes.strategies.jap.machine import Kernel, kernel_for
from lightning_pipes.strategies.jap.problem import ArrayProblem


def longest_job(problem: ArrayProblem) -> int:
    """Nanoseconds of the longest job, alone."""
    return int(problem.tails.max())


def busiest_stage(problem: ArrayProblem) -> int:
    """Nanoseconds of the worst stage's work, with the shortest ways to its first block and from its last one."""
    busy, head, tail = (a.reshape(problem.stages, -1) for a in (problem.busy, problem.heads, problem.tails))
    return int((head.min(1) + busy.sum(1) + (tail - busy).min(1)).max())


def interrupted(problem: ArrayProblem, kernel: Kernel | None = None) -> int:
    """Nanoseconds that the worst stage would need if it alone were limited and could interrupt its blocks (Jackson).

    It knows when each block can come and what follows it, and is never below `busiest_stage` and `longest_job`.
    """
    by = kernel or kernel_for(problem.blocks)
    tables = [a.reshape(problem.stages, -1) for a in (problem.heads, problem.busy, problem.tails - problem.busy)]
    worst = 0
    for head, busy, after in zip(*tables, strict=True):
        of = (by.copy(head), by.copy(busy), by.copy(after))
        worst = max(worst, by.run.one_machine(2 * problem.jobs, *of))
    return int(worst)


def lower_bound(problem: ArrayProblem) -> int:
    """The best bound there is, in nanoseconds."""
    return max(interrupted(problem), busiest_stage(problem), longest_job(problem))
