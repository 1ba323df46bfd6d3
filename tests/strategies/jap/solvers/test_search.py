"""Check the search and the limits of its effort."""

from lightning_pipes.strategies.jap import Effort, solve_array
from lightning_pipes.strategies.jap.solvers.genetic import (
    evolve_orders,
)
from lightning_pipes.strategies.jap.solvers.rules import order_by_rule
from lightning_pipes.strategies.jap.solvers.search import search_orders
from lightning_pipes.strategies.jap.solvers.solve import solve_as_printed
from tests.strategies.jap.random_arrays import random_array


def test_the_clock_ends_a_search():
    looks = iter(range(10**6))
    found = search_orders(random_array(12, 4), Effort(10**9, lambda: next(looks) > 20))
    assert 0 < found.tried < 10_000


def test_search_beats_the_paper():
    """Check that a small effort already beats the paper's methods.

    Pure Python needs seconds for this effort. The file benchmarks/jap.py measures one second of compiled code.
    """
    problem = random_array(16, 8)
    found = search_orders(problem, Effort(1500))
    assert found.makespan < 0.95 * solve_as_printed(problem).makespan
    assert found.makespan < 0.90 * evolve_orders(problem, Effort(3000)).makespan


def test_a_known_order_is_returned_if_the_effort_finds_no_better_one():
    problem = random_array(12, 4)
    known = search_orders(problem, Effort(1500))
    assert search_orders(problem, Effort(1)).makespan > known.makespan
    assert search_orders(problem, Effort(1), incumbent=known).makespan == known.makespan


def test_effort_in_seconds():
    """Check an effort in seconds with a clock that advances by one at each reading."""
    ticks = iter(range(1000))
    effort = Effort.from_seconds(5, clock=lambda: next(ticks))
    assert [effort.is_left for _ in range(8)] == [True] * 5 + [False] * 3
    problem = random_array(8, 4)
    assert solve_array(problem, effort=0.05).makespan <= order_by_rule(problem, "pyramid").makespan
