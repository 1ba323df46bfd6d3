"""Branch and bound that does return: the best order of a small array, or how far from it one may be."""

from __future__ import annotations

import numpy as np

from lightning_pipes.strategies.jap.problem import ArrayProblem
from lightning_pipes.strategies.jap.solvers.bounds import lower_bound
from lightning_pipes.strategies.jap.solvers.kernel import SOLVERS
from lightning_pipes.strategies.jap.solvers.search import Effort
from lightning_pipes.strategies.jap.solvers.solution import Solution
from lightning_pipes.strategies.jap.solvers.tables import Rest, Tree

CHUNK = 500
"""Nodes that are expanded between two looks at the clock."""


def branched(problem: ArrayProblem, effort: Effort, incumbent: Solution) -> Solution:
    """The best order there is, given the nodes of `effort`; else the best found, with the least bound of what is open.

    See `kernel.branched` for what it branches on. A node's bound is that of its stages with interrupted blocks.
    """
    n, jobs, stages = problem.blocks, problem.jobs, problem.stages
    by = SOLVERS.fastest if effort.orders > CHUNK else SOLVERS.python
    bound = lower_bound(problem)
    levels = n + stages * jobs + 2  # a stage may be held before each block
    tree = Tree(*(by.fill(levels * size) for size in (jobs, jobs, stages, stages, 1, 1, 2 * jobs, 2 * jobs)))
    for at in range(stages):
        tree.holds[at] = -1
    starts = by.fill(n)
    best, best_starts = by.copy([incumbent.makespan]), by.copy(incumbent.starts)
    depth, spent = 0, 0
    rest = Rest(by.fill(n), *(by.fill(2 * jobs) for _ in range(3)))
    blocks, same = problem.read(by), by.copy(_before(problem))
    for job in range(jobs):  # the first stage begins with some forward
        if _before(problem)[job] < 0:
            tree.children[tree.counts[0]], tree.promises[tree.counts[0]] = job, bound
            tree.counts[0] += 1
    while depth >= 0 and best[0] > bound and effort.left:
        depth = by.run.branched(blocks, same, depth, CHUNK, best, best_starts, starts, tree, rest)
        effort.spent += CHUNK
        spent += CHUNK
    makespan = int(best[0])
    open_ = [tree.promises[d * 2 * jobs + c] for d in range(depth + 1) for c in range(tree.counts[d])]
    least = min([makespan, *map(int, open_)], default=makespan)
    found = np.array(best_starts, np.int64)
    return Solution(problem, found, makespan, max(bound, least), "branch and bound", incumbent.tried + spent)


def _before(problem: ArrayProblem) -> np.ndarray:
    """By job, the one before it with equal times; -1 for none."""
    last: dict[int, int] = {}
    out = np.full(problem.jobs, -1, np.int64)
    for job, kind in enumerate(problem.same.tolist()):
        out[job] = last.get(kind, -1)
        last[kind] = job
    return out
