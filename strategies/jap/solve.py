"""Any solver by its name, and the choice between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from lightning_pipes.cost.named import known
from lightning_pipes.strategies.jap.branch import branched
from lightning_pipes.strategies.jap.genetic import evolved
from lightning_pipes.strategies.jap.greedy import as_printed
from lightning_pipes.strategies.jap.problem import ArrayProblem
from lightning_pipes.strategies.jap.rules import RULES, by_rule
from lightning_pipes.strategies.jap.search import ROUND, Effort, searched
from lightning_pipes.strategies.jap.solution import Solution

THRESHOLD = 4
"""Jobs up to which `solved` looks for a proof. The paper's is 30, for what it takes for branch and bound."""

Solver = Callable[[ArrayProblem, Effort, int], Solution]


def solved(
    problem: ArrayProblem,
    method: str = "auto",
    effort: Effort | None = None,
    seed: int = 0,
    threshold: int = THRESHOLD,
) -> Solution:
    """The best order found of one iteration of an array, with a bound and the gap between them.

    Args:
        method: "auto", one of `METHODS`, or a rule of `rules.RULES`. `auto` searches; up to `threshold` jobs branch and
            bound then goes on from what was found.
        effort: how many orders may be timed and nodes expanded, and until when; see `Effort`.

    Raises:
        InputError: nobody knows the method.
    """
    effort = effort or Effort()
    rules: dict[str, Solver] = {rule: partial(_by_rule, rule=rule) for rule in RULES}
    if method != "auto":
        return known({**METHODS, **rules}, method, "solver")(problem, effort, seed)
    first = effort if problem.jobs > threshold else replace(effort, orders=min(effort.orders // 4, 3 * ROUND))
    found = searched(problem, first, seed)
    if problem.jobs <= threshold and found.gap > 0:
        return branched(problem, replace(effort, spent=first.spent), found)
    return found


def _by_rule(problem: ArrayProblem, effort: Effort, seed: int, rule: str) -> Solution:
    return by_rule(problem, rule)


def _branched(problem: ArrayProblem, effort: Effort, seed: int) -> Solution:
    return branched(problem, effort, by_rule(problem, "longest first"))


def _printed(problem: ArrayProblem, effort: Effort, seed: int) -> Solution:
    return as_printed(problem)


METHODS: Mapping[str, Solver] = {
    "search": searched,
    "branch and bound": _branched,
    "algorithm 1": _printed,
    "genetic": evolved,
}
