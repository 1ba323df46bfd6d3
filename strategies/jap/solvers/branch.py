"""Branch and bound that does return: the best order of a small array, or how far from it one may be."""

from __future__ import annotations

import numpy as np

from lightning_pipes.strategies.jap.problem import ArrayProblem, ArraySolution
from lightning_pipes.strategies.jap.solvers.bounds import lower_bound
from lightning_pipes.strategies.jap.solvers.kernel import SOLVERS, kernel_for
from lightning_pipes.strategies.jap.solvers.search import Effort
from lightning_pipes.strategies.jap.solvers.tables import Begun, Rest, Tree

CHUNK = 500
"""Nodes that are expanded between two looks at the clock."""


def branch_and_bound(problem: ArrayProblem, effort: Effort, incumbent: ArraySolution) -> ArraySolution:
    """Return the best order there is, given the nodes of `effort`; else the best found, with the least bound of what is
    open.

    See `kernel.expand_nodes` for what it branches on. A node's bound is that of its stages with interrupted blocks.
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
    while depth >= 0 and best[0] > bound and effort.is_left:
        depth = by.run.expand_nodes(blocks, same, depth, CHUNK, best, best_starts, starts, tree, rest)
        effort.spent += CHUNK
        spent += CHUNK
    makespan = int(best[0])
    open_ = [tree.promises[d * 2 * jobs + c] for d in range(depth + 1) for c in range(tree.counts[d])]
    least = min([makespan, *map(int, open_)], default=makespan)
    found = np.array(best_starts, np.int64)
    return ArraySolution(problem, found, makespan, max(bound, least), "branch and bound", incumbent.tried + spent)


def _before(problem: ArrayProblem) -> np.ndarray:
    """Return the previous job with equal times by job; -1 for none."""
    last: dict[int, int] = {}
    out = np.full(problem.jobs, -1, np.int64)
    for job, kind in enumerate(problem.equal_jobs.tolist()):
        out[job] = last.get(kind, -1)
        last[kind] = job
    return out


def solve_as_printed(problem: ArrayProblem) -> ArraySolution:
    """Return the paper's branch and bound (S IV-B, Algorithm 1): block by block it commits to the one with the least
    bound, the last of equals, and never returns; so nothing says that the result is best. See `branch` for a search.

    Read with its sets made anew at each block, which the print forgets. The bound of a stage is that of interrupted
    blocks (Jackson): the exact 1|r_j|L_max is NP-hard.
    """
    by = kernel_for(problem.blocks * problem.jobs * problem.blocks // 2)
    n, j, s = problem.blocks, problem.jobs, problem.stages
    starts = by.fill(n)
    begun = Begun(by.fill(j), by.fill(j), by.fill(s), by.fill(s, -1))
    by.run.construct_order(problem.read(by), begun, Rest(by.fill(n), *(by.fill(2 * j) for _ in range(3))), starts)
    found = np.array(starts, np.int64)
    return ArraySolution(problem, found, problem.makespan(found), lower_bound(problem), "algorithm 1")
