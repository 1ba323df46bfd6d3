"""The order of a job array that goes in rounds, as the paper's does: a batch of every sibling, in a searched order."""

from __future__ import annotations

from functools import lru_cache

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import Cut, Plan, Program
from lightning_pipes.strategies.jap.costs import program_of
from lightning_pipes.strategies.jap.problem import problem_of
from lightning_pipes.strategies.jap.solvers.search import Effort
from lightning_pipes.strategies.jap.solvers.solve import solved

EFFORT = 40_000
"""Blocks that are placed in all orders that are tried: what Python does in 50 ms, whenever siblings change."""


@lru_cache(maxsize=256)
def round_order(rows: tuple[int, ...], stages: int) -> Program:
    """The order of a round, for `JobArray(size, rounds=round_order)`: the jobs count as `rows` does, which has the
    samples of each batch.

    Blocks are taken to last as long as they have rows, backwards twice as long. The same everywhere, so that all ranks
    find the same order.

    Raises:
        InputError: no jobs, no stages, or a batch without rows.
    """
    plan = Plan(tuple(range(stages)), tuple(Cut.even(each, 1, stages) for each in rows))
    problem = problem_of(plan, CostModel.uniform(stages, 1e-3, 2e-3, rows=1))
    return program_of(solved(problem, effort=Effort(EFFORT // problem.blocks)).order, plan)
