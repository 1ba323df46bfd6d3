"""A search for good orders in limited time: insertion, annealing, and exchanges along the longest path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lightning_pipes.ir.clock import read_seconds
from lightning_pipes.sim.loops.jit import LATEST_TIME
from lightning_pipes.strategies.jap.problem import Array, ArrayProblem, ArraySolution, time_order
from lightning_pipes.strategies.jap.solvers import rules
from lightning_pipes.strategies.jap.solvers.bounds import lower_bound
from lightning_pipes.strategies.jap.solvers.kernel import LUCK_SCALE, kernel_for
from lightning_pipes.strategies.jap.solvers.tables import Chance, Path, Sequence, Style, Sweep, Urgency

LUCK_TABLE = np.rint(-np.log((np.arange(4096) + 0.5) / 4096) * LUCK_SCALE).astype(np.int64)
"""Random tolerances of annealing, in units of temperature / `LUCK_SCALE`.

A draw from this table accepts a worse order with the probability exp(-worse / temperature).
"""
TEMPERATURE_DIVISOR = 333
"""The divisor of the makespan that gives the first temperature."""
ORDERS_PER_ROUND = 4_000
"""The number of orders that one round of annealing tries.

After that, `EXCHANGES_PER_ORDER` times as many exchanges of blocks follow.
"""
EXCHANGES_PER_ORDER = 2
ORDERS_PER_CHECK = 200
"""The number of orders that are tried between two checks of the clock."""


@dataclass
class Effort:
    """The budget of a search.

    Only a budget that counts orders gives reproducible results. Ranks that must agree on an order may not pass `over`.

    Attributes:
        orders: the number of orders that may be timed.
        over: returns whether the search must end, for example by a clock.
        spent: the number of orders that were timed until now.
    """

    orders: int = 20_000
    over: Callable[[], bool] = field(default=lambda: False)
    spent: int = 0

    @classmethod
    def from_seconds(cls, seconds: float, clock: Callable[[], float] = read_seconds) -> Effort:
        """Return a budget that ends `seconds` from now, as measured by `clock`. Results then differ from run to run."""
        end = clock() + seconds
        return cls(10**9, lambda: clock() > end)

    @property
    def is_left(self) -> bool:
        """Whether the search may try another order."""
        return self.spent < self.orders and not self.over()


def search_orders(
    problem: ArrayProblem, effort: Effort, seed: int = 0, bound: int = 0, incumbent: ArraySolution | None = None
) -> ArraySolution:
    """Return the best order that was found.

    It is at least as good as the order of every rule and as `incumbent`. The jobs are inserted one by one, each at the
    position where the makespan grows least (Nawaz, Enscore and Ham 1983). Rounds of improvement follow, which start
    from the best of these orders in turn. A round first anneals the places of jobs, the direction that goes first, and
    the time that a stage waits for a better block. It then exchanges blocks along the longest path.

    Args:
        problem: the iteration.
        effort: the budget, which the search updates.
        seed: the seed of the random numbers.
        bound: the nanoseconds at which the search ends. 0 means `lower_bound`.
        incumbent: an order that is already known.
    """
    search = _Search(problem, effort, seed, bound or lower_bound(problem))
    beginnings = [search.order_by_rule(rule) for rule in rules.PRIORITY_RULES]
    for longest_first in (True, False):
        for style in (0, 2):
            beginnings += search.insert_jobs(longest_first, style)
    beginnings.sort(key=lambda beginning: beginning.makespan)
    if incumbent is not None and search.keep_best(incumbent.starts) <= search.makespan and search.can_improve:
        search.exchange_blocks(incumbent.starts)
    turn = 0
    while search.can_improve:
        search.exchange_blocks(search.anneal_places(beginnings[turn % len(beginnings)]))
        turn += 1
    return ArraySolution(problem, search.starts, search.makespan, search.bound, "search", effort.spent)


class _Beginning(NamedTuple):
    """An order by the places of jobs and a style (see `rules.PRIORITY_RULES`), and its makespan."""

    makespan: int
    style: int
    places: Array


class _Search:
    """The best order until now, and the methods that improve it."""

    def __init__(self, problem: ArrayProblem, effort: Effort, seed: int, bound: int) -> None:
        self.problem, self.bound = problem, bound
        self.makespan, self.starts = LATEST_TIME, problem.earliest_starts
        self._effort = effort
        self._by = by = kernel_for(effort.orders * problem.blocks)
        self._blocks = problem.read(by)
        self._luck = by.copy(LUCK_TABLE)
        self._rng = by.copy([seed % 2147483646 + 1])

    @property
    def can_improve(self) -> bool:
        """Whether a better order may exist and the effort is not spent."""
        return self.makespan > self.bound and self._effort.is_left

    def keep_best(self, starts: Array) -> int:
        """Return the makespan of an order in nanoseconds, and store the order if it is the best one."""
        makespan = self.problem.makespan(starts)
        if makespan < self.makespan:
            self.makespan, self.starts = makespan, starts
        return makespan

    def order_by_rule(self, rule: str) -> _Beginning:
        """Return the order of a rule."""
        place, style = rules.PRIORITY_RULES[rule]
        there = place(self.problem)
        return _Beginning(
            self.keep_best(rules.start_times(self.problem, there, there, style, 0, self._by)), style, there
        )

    def insert_jobs(self, longest_first: bool, style: int) -> list[_Beginning]:
        """Insert the jobs one by one, and return the resulting order; an empty list if the effort ends before the last
        job."""
        by, jobs = self._by, self.problem.jobs
        places = rules.longest_first(self.problem)
        order = by.copy(np.argsort(places if longest_first else -places))
        row, urgency = by.fill(jobs), Urgency(by.fill(jobs), by.fill(jobs))
        notes, starts = rules.make_notes(self.problem, by), by.fill(self.problem.blocks)
        for k in range(jobs):
            if not self.can_improve:
                return []
            by.run.insert_job(self._blocks, urgency, notes, order, k, row, 4 * jobs * (style == 0), LATEST_TIME, starts)
            self._effort.spent += k + 1
        there = rules.places_from_order(np.array(row, np.int64))
        return [_Beginning(self.keep_best(rules.start_times(self.problem, there, there, style, 0, by)), style, there)]

    def anneal_places(self, beginning: _Beginning) -> Array:
        """Return the starts of the best order of one round of annealing."""
        by, p = self._by, self.problem
        rule = [beginning.style, 0, beginning.makespan]
        now, before, best = (Style(*map(by.copy, (beginning.places, beginning.places, rule))) for _ in range(3))
        mean = max(1, int(p.forward.mean()))
        urgency = Urgency(by.fill(p.jobs), by.fill(p.jobs))
        notes, room, chance = rules.make_notes(p, by), by.fill(p.blocks), self._chance(ORDERS_PER_ROUND)
        self._in_chunks(
            ORDERS_PER_ROUND,
            lambda begin, end: by.run.anneal_places(
                self._blocks, chance, begin, end, mean, now, before, best, urgency, notes, room
            ),
        )
        there, back = (np.array(each, np.int64) for each in (best.there, best.back))
        starts = rules.start_times(p, there, back, int(best.rule[0]), int(best.rule[1]), by)
        self.keep_best(starts)
        return starts

    def exchange_blocks(self, starts: Array) -> None:
        """Run one round of exchanges of blocks that follow each other on the longest path."""
        by, p = self._by, self.problem
        given = p.order_of(starts).reshape(-1)
        order, best_sequence = Sequence(by.copy(given), by.copy(np.argsort(given))), by.copy(given)
        value, chance = by.fill(2, p.makespan(starts)), self._chance(EXCHANGES_PER_ORDER * ORDERS_PER_ROUND)
        path, path_new = (Path(by.fill(p.blocks), by.fill(p.blocks)) for _ in range(2))
        sweep = Sweep(by.fill(p.blocks), by.fill(p.blocks))
        self._in_chunks(
            EXCHANGES_PER_ORDER * ORDERS_PER_ROUND,
            lambda begin, end: by.run.exchange_blocks(
                self._blocks, chance, begin, end, order, value, best_sequence, path, path_new, sweep
            ),
        )
        found = time_order(p, np.array(best_sequence, np.int64).reshape(p.stages, -1), by)
        assert found is not None
        self.keep_best(found)

    def _chance(self, total: int) -> Chance:
        return Chance(self.bound, self._luck, TEMPERATURE_DIVISOR, total, self._rng)

    def _in_chunks(self, total: int, some: Callable[[int, int], object]) -> None:
        for begin in range(0, total, ORDERS_PER_CHECK):
            if not self.can_improve:
                return
            some(begin, min(begin + ORDERS_PER_CHECK, total))
            self._effort.spent += ORDERS_PER_CHECK
