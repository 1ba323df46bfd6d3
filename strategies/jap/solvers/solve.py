"""The solvers by name, and the choice between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from lightning_pipes.ir.checks import lookup_name
from lightning_pipes.strategies.jap.problem import ArrayProblem, ArraySolution
from lightning_pipes.strategies.jap.solvers.bounds import lower_bound
from lightning_pipes.strategies.jap.solvers.genetic import evolve_orders
from lightning_pipes.strategies.jap.solvers.kernel import SOLVER_KERNELS, kernel_for
from lightning_pipes.strategies.jap.solvers.rules import PRIORITY_RULES, order_by_rule
from lightning_pipes.strategies.jap.solvers.search import ORDERS_PER_ROUND, Effort, search_orders
from lightning_pipes.strategies.jap.solvers.tables import Begun, Rest, Tree

MAX_PROOF_JOBS = 4
"""The largest number of jobs for which `solve_array` spends the whole effort on a proof.

The paper uses 30 for its branch and bound.
"""
MAX_PROOF_BLOCKS = 64
"""The largest number of blocks for which branch and bound often finds a proof within `MAX_FIRST_NODES` nodes, for any
number of jobs."""
NODES_PER_CHECK = 500
"""The number of nodes that are expanded between two checks of the clock."""
MAX_FIRST_NODES = 2 * NODES_PER_CHECK
MAX_ALGORITHM_1_SIZE = 5_000
"""The largest product of blocks and jobs for which "auto" begins with Algorithm 1.

The algorithm evaluates at most one candidate per job for every block. Python needs a quarter of a second for this
number of evaluations. For larger problems, a search finds better orders in the same time.
"""

Solver = Callable[[ArrayProblem, Effort, int], ArraySolution]


def solve_array(
    problem: ArrayProblem,
    method: str = "auto",
    effort: Effort | float | None = None,
    seed: int = 0,
    threshold: int = MAX_PROOF_JOBS,
) -> ArraySolution:
    """Return the best order that was found for one iteration of an array, with a lower bound and the gap between them.

    With `method="auto"`, the solver begins with the order of Algorithm 1 if this takes a small part of the effort, and
    then searches for better orders. Branch and bound continues from the best order: with up to `threshold` jobs until
    the effort is spent, and for other small arrays for a few milliseconds.

    Args:
        problem: the iteration.
        method: "auto", one of `SOLVE_METHODS`, or a rule of `rules.PRIORITY_RULES`.
        effort: the limit in seconds, or an `Effort`, which limits the number of orders that are timed and nodes that
            are expanded. With an `Effort` that has no time limit, results are the same on every machine.
        seed: the seed of the random numbers.
        threshold: the largest number of jobs for which "auto" spends the whole effort on a proof.

    Raises:
        InputError: the method is unknown.
    """
    if not isinstance(effort, Effort):
        effort = Effort() if effort is None else Effort.from_seconds(effort)
    rules: dict[str, Solver] = {rule: partial(_by_rule, rule=rule) for rule in PRIORITY_RULES}
    if method != "auto":
        return lookup_name({**SOLVE_METHODS, **rules}, method, "solver")(problem, effort, seed)
    found = None
    if problem.blocks * problem.jobs <= min(effort.orders // 4, MAX_ALGORITHM_1_SIZE):
        found = solve_as_printed(problem)
        effort.spent += problem.blocks
    few, small = problem.jobs <= threshold, problem.blocks <= MAX_PROOF_BLOCKS
    if few or small:
        first = replace(effort, orders=min(effort.orders // 4, 3 * ORDERS_PER_ROUND))
        found = search_orders(problem, first, seed, incumbent=found)
        effort.spent = first.spent
        if found.gap > 0:
            nodes = replace(effort, orders=effort.orders if few else min(effort.orders, effort.spent + MAX_FIRST_NODES))
            found = branch_and_bound(problem, nodes, found)
            effort.spent = nodes.spent
        if few or not found.gap:
            return found
    better = search_orders(problem, effort, seed, incumbent=found)
    return better if found is None else replace(better, bound=max(better.bound, found.bound))


def _by_rule(problem: ArrayProblem, effort: Effort, seed: int, rule: str) -> ArraySolution:
    return order_by_rule(problem, rule)


def _branched(problem: ArrayProblem, effort: Effort, seed: int) -> ArraySolution:
    return branch_and_bound(problem, effort, order_by_rule(problem, "longest first"))


def _printed(problem: ArrayProblem, effort: Effort, seed: int) -> ArraySolution:
    return solve_as_printed(problem)


SOLVE_METHODS: Mapping[str, Solver] = {
    "search": search_orders,
    "branch and bound": _branched,
    "algorithm 1": _printed,
    "genetic": evolve_orders,
}


def branch_and_bound(problem: ArrayProblem, effort: Effort, incumbent: ArraySolution) -> ArraySolution:
    """Return the optimal order, or the best order that was found if `effort` does not suffice for a proof.

    If the search is not complete, the bound of the solution is the least bound of the nodes that are still open.
    `kernel.expand_nodes` describes the branches. The bound of a node is the bound of its stages with interrupted
    blocks.

    Args:
        problem: the iteration.
        effort: the limit, as a number of nodes.
        incumbent: the order to improve.
    """
    n, jobs, stages = problem.blocks, problem.jobs, problem.stages
    by = SOLVER_KERNELS.fastest if effort.orders > NODES_PER_CHECK else SOLVER_KERNELS.python
    bound = lower_bound(problem)
    levels = n + stages * jobs + 2  # a stage may be reserved before each block
    tree = Tree(*(by.fill(levels * size) for size in (jobs, jobs, stages, stages, stages, 1, 1, 2 * jobs, 2 * jobs)))
    for at in range(stages):
        tree.holds[at] = tree.lasts[at] = -1
    starts = by.fill(n)
    best, best_starts = by.copy([incumbent.makespan]), by.copy(incumbent.starts)
    depth, spent = 0, 0
    rest = Rest(by.fill(n), *(by.fill(2 * jobs) for _ in range(3)))
    blocks, same = problem.read(by), by.copy(_before(problem))
    for job in range(jobs):  # the first stage begins with one of the forwards
        if _before(problem)[job] < 0:
            tree.children[tree.counts[0]], tree.promises[tree.counts[0]] = job, bound
            tree.counts[0] += 1
    while depth >= 0 and best[0] > bound and effort.is_left:
        depth = by.run.expand_nodes(blocks, same, depth, NODES_PER_CHECK, best, best_starts, starts, tree, rest)
        effort.spent += NODES_PER_CHECK
        spent += NODES_PER_CHECK
    makespan = int(best[0])
    open_ = [tree.promises[d * 2 * jobs + c] for d in range(depth + 1) for c in range(tree.counts[d])]
    least = min([makespan, *map(int, open_)], default=makespan)
    found = np.array(best_starts, np.int64)
    return ArraySolution(problem, found, makespan, max(bound, least), "branch and bound", incumbent.tried + spent)


def _before(problem: ArrayProblem) -> np.ndarray:
    """Return the previous job with equal times, by job; -1 if there is none.

    If a job's own backward saves a switch, all entries are -1, because exchanging the blocks of equal jobs could lose
    this saving.
    """
    if problem.saved_times.any():
        return np.full(problem.jobs, -1, np.int64)
    last: dict[int, int] = {}
    out = np.full(problem.jobs, -1, np.int64)
    for job, kind in enumerate(problem.equal_jobs.tolist()):
        out[job] = last.get(kind, -1)
        last[kind] = job
    return out


def solve_as_printed(problem: ArrayProblem) -> ArraySolution:
    """Return the order of the paper's branch and bound as printed (S IV-B, Algorithm 1).

    Block by block, the algorithm commits to the candidate with the least bound, or to the last of several equal ones,
    and never backtracks. The order is therefore not proven to be optimal. `branch_and_bound` is a complete search.

    The candidate sets are computed again for each block, which the printed algorithm omits. The bound of a stage allows
    interrupted blocks (Jackson), because the exact bound 1|r_j|L_max is NP-hard.
    """
    by = kernel_for(problem.blocks * problem.jobs * problem.blocks // 2)
    n, j, s = problem.blocks, problem.jobs, problem.stages
    starts = by.fill(n)
    begun = Begun(by.fill(j), by.fill(j), by.fill(s), by.fill(s, -1), by.fill(s, -1))
    by.run.construct_order(problem.read(by), begun, Rest(by.fill(n), *(by.fill(2 * j) for _ in range(3))), starts)
    found = np.array(starts, np.int64)
    return ArraySolution(problem, found, problem.makespan(found), lower_bound(problem), "algorithm 1")
