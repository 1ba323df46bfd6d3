"""Orders by a rule: every stage that is free takes the ready block that comes first by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lightning_pipes.ir.checks import lookup_name
from lightning_pipes.sim.loops.jit import Kernel
from lightning_pipes.strategies.jap.problem import Array, ArrayProblem, ArraySolution
from lightning_pipes.strategies.jap.solvers.bounds import lower_bound
from lightning_pipes.strategies.jap.solvers.kernel import NEVER, kernel_for
from lightning_pipes.strategies.jap.solvers.tables import Notes, Urgency


def by_number(problem: ArrayProblem) -> Array:
    """First come, first served where jobs have arrived by number: places by job."""
    return np.arange(problem.jobs)


def longest_first(problem: ArrayProblem) -> Array:
    """Return places by job, the one with most work first."""
    return places_from_order(np.argsort(-_work(problem), kind="stable"))


def longest_in_the_middle(problem: ArrayProblem) -> Array:
    """Return places by job: short ones at both ends, which fill and empty the pipeline, long ones between them."""
    short = np.argsort(_work(problem), kind="stable")
    return places_from_order(np.concatenate([short[::2], short[1::2][::-1]]))


RULES: Mapping[str, tuple[Any, int]] = {
    "backward first": (by_number, 0),
    "forward first": (by_number, 1),
    "longest first": (longest_first, 0),
    "pyramid": (longest_in_the_middle, 0),
}
"""Places, and what goes first among ready blocks: 0 backwards, 1 forwards, 2 the smaller place."""


def order_by_rule(problem: ArrayProblem, rule: str) -> ArraySolution:
    """Return the order that a rule gives.

    Raises:
        InputError: the rule is unknown.
    """
    place, style = lookup_name(RULES, rule, "rule")
    there = place(problem)
    starts = start_times(problem, there, there, style, 0, kernel_for(problem.blocks))
    return ArraySolution(problem, starts, problem.makespan(starts), lower_bound(problem), rule)


def start_times(problem: ArrayProblem, there: Array, back: Array, style: int, patience: int, by: Kernel) -> Array:
    """Start by block number, from places of forwards and backwards; see `kernel.list_schedule`."""
    n, j = problem.blocks, problem.jobs
    urgency = Urgency(*map(by.copy, urgency_numbers(there, back, style)))
    starts = by.fill(n)
    by.run.list_schedule(problem.read(by), urgency, make_notes(problem, by), j, patience, NEVER, starts)
    return np.array(starts, np.int64)


def urgency_numbers(there: Array, back: Array, style: int) -> tuple[Array, Array]:
    """Return the input of `kernel.list_schedule`: numbers of forwards and of backwards, all different."""
    ahead = 4 * len(there)
    return 2 * there + 1 + ahead * (style == 0), 2 * back + ahead * (style == 1)


def make_notes(problem: ArrayProblem, by: Kernel) -> Notes:
    """Return room for the kernel's notes on all jobs, and no `need` of theirs."""
    n, s = problem.blocks, problem.stages
    jobs = by.copy(np.arange(problem.jobs))
    return Notes(jobs, by.fill(s), by.fill(n), by.fill(s), by.fill(s), by.fill(s), by.fill(n), by.fill(s), by.fill(s))


def places_from_order(order: Array) -> Array:
    """Return the place of each job in an order of jobs."""
    return np.argsort(order)


def _work(problem: ArrayProblem) -> Array:
    return np.asarray(sum(problem.occupied_times).sum(1), np.int64)  # type: ignore[union-attr]
