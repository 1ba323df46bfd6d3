"""Orders by a rule: a free stage runs the ready block that comes first according to the rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lightning_pipes.ir.checks import lookup_name
from lightning_pipes.sim.loops.jit import LATEST_TIME, Kernel
from lightning_pipes.strategies.jap.problem import Array, ArrayProblem, ArraySolution
from lightning_pipes.strategies.jap.solvers.bounds import lower_bound
from lightning_pipes.strategies.jap.solvers.kernel import kernel_for
from lightning_pipes.strategies.jap.solvers.tables import Notes, Urgency


def by_number(problem: ArrayProblem) -> Array:
    """Return the place of each job, which is its number. Jobs are then served in the order of their numbers."""
    return np.arange(problem.jobs)


def longest_first(problem: ArrayProblem) -> Array:
    """Return the place of each job, with the job that has the most work first."""
    return places_from_order(np.argsort(-_work(problem), kind="stable"))


def longest_in_the_middle(problem: ArrayProblem) -> Array:
    """Return the place of each job, with short jobs at both ends and long jobs between them.

    The short jobs fill and empty the pipeline.
    """
    short = np.argsort(_work(problem), kind="stable")
    return places_from_order(np.concatenate([short[::2], short[1::2][::-1]]))


PRIORITY_RULES: Mapping[str, tuple[Any, int]] = {
    "backward first": (by_number, 0),
    "forward first": (by_number, 1),
    "longest first": (longest_first, 0),
    "pyramid": (longest_in_the_middle, 0),
}
"""The rules by name: a function that returns the places of the jobs, and the style.

The style specifies which of the ready blocks go first: 0 backwards, 1 forwards, 2 the block with the smaller place.
"""


def order_by_rule(problem: ArrayProblem, rule: str) -> ArraySolution:
    """Return the order of a rule.

    Args:
        problem: the iteration.
        rule: a name in `PRIORITY_RULES`.

    Raises:
        InputError: the rule is unknown.
    """
    place, style = lookup_name(PRIORITY_RULES, rule, "rule")
    there = place(problem)
    starts = start_times(problem, there, there, style, 0, kernel_for(problem.blocks))
    return ArraySolution(problem, starts, problem.makespan(starts), lower_bound(problem), rule)


def start_times(problem: ArrayProblem, there: Array, back: Array, style: int, patience: int, by: Kernel) -> Array:
    """Return the start of each block by number, in nanoseconds, if a list scheduler runs; see `kernel.list_schedule`.

    Args:
        problem: the iteration.
        there, back: the place of each job among forwards, and among backwards.
        style: which of the ready blocks go first; see `PRIORITY_RULES`.
        patience: the nanoseconds that a stage may wait for a better block.
        by: the kernel to run.
    """
    n, j = problem.blocks, problem.jobs
    urgency = Urgency(*map(by.copy, urgency_numbers(there, back, style)))
    starts = by.fill(n)
    by.run.list_schedule(problem.read(by), urgency, make_notes(problem, by), j, patience, LATEST_TIME, starts)
    return np.array(starts, np.int64)


def urgency_numbers(there: Array, back: Array, style: int) -> tuple[Array, Array]:
    """Return the urgencies of forwards and of backwards for `kernel.list_schedule`; all numbers are different."""
    ahead = 4 * len(there)
    return 2 * there + 1 + ahead * (style == 0), 2 * back + ahead * (style == 1)


def make_notes(problem: ArrayProblem, by: Kernel) -> Notes:
    """Return the working memory of the kernel for all jobs, with a `need` of zero."""
    n, s = problem.blocks, problem.stages
    jobs = by.copy(np.arange(problem.jobs))
    return Notes(jobs, by.fill(s), by.fill(n), by.fill(s), by.fill(s), by.fill(s), by.fill(n), by.fill(s), by.fill(s))


def places_from_order(order: Array) -> Array:
    """Return the place of each job in an order of jobs."""
    return np.argsort(order)


def _work(problem: ArrayProblem) -> Array:
    return np.asarray(sum(problem.occupied_times).sum(1), np.int64)  # type: ignore[union-attr]
