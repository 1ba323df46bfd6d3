"""Any solver by its name, and the choice between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from lightning_pipes.cost.lookup import lookup_name
from lightning_pipes.strategies.jap.problem import ArrayProblem, ArraySolution
from lightning_pipes.strategies.jap.solvers.branch import CHUNK, branch_and_bound, solve_as_printed
from lightning_pipes.strategies.jap.solvers.genetic import evolve_orders
from lightning_pipes.strategies.jap.solvers.rules import RULES, order_by_rule
from lightning_pipes.strategies.jap.solvers.search import ROUND, Effort, search_orders

THRESHOLD = 4
"""Jobs up to which `solve_array` looks for a proof as long as it may. The paper has 30, for its branch and bound."""
AT_ONCE = 64
"""Blocks of arrays that branch and bound often proves within `NODES`, whatever the number of jobs."""
NODES = 2 * CHUNK
LOOKS = 5_000
"""Algorithm 1 chooses each block among as many as there are jobs, at most: as many looks cost Python a quarter of a
second, and above that a search finds better orders in as long."""

Solver = Callable[[ArrayProblem, Effort, int], ArraySolution]


def solve_array(
    problem: ArrayProblem,
    method: str = "auto",
    effort: Effort | float | None = None,
    seed: int = 0,
    threshold: int = THRESHOLD,
) -> ArraySolution:
    """Return the best order found of one iteration of an array, with a bound and the gap between them.

    Args:
        method: "auto", one of `METHODS`, or a rule of `rules.RULES`. `auto` begins with Algorithm 1's order where that
            takes little of the effort, and searches; branch and bound goes on from what was found, up to `threshold`
            jobs to the end, and in other small arrays for as long as takes it some milliseconds.
        effort: seconds; or how many orders may be timed and nodes expanded, and until when, as an `Effort`, with which
            results are the same everywhere.

    Raises:
        InputError: nobody knows the method.
    """
    if not isinstance(effort, Effort):
        effort = Effort() if effort is None else Effort.from_seconds(effort)
    rules: dict[str, Solver] = {rule: partial(_by_rule, rule=rule) for rule in RULES}
    if method != "auto":
        return lookup_name({**METHODS, **rules}, method, "solver")(problem, effort, seed)
    found = None
    if problem.blocks * problem.jobs <= min(effort.orders // 4, LOOKS):
        found = solve_as_printed(problem)
        effort.spent += problem.blocks
    few, small = problem.jobs <= threshold, problem.blocks <= AT_ONCE
    if few or small:
        first = replace(effort, orders=min(effort.orders // 4, 3 * ROUND))
        found = search_orders(problem, first, seed, incumbent=found)
        effort.spent = first.spent
        if found.gap > 0:
            nodes = replace(effort, orders=effort.orders if few else min(effort.orders, effort.spent + NODES))
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


METHODS: Mapping[str, Solver] = {
    "search": search_orders,
    "branch and bound": _branched,
    "algorithm 1": _printed,
    "genetic": evolve_orders,
}
