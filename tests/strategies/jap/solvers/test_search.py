"""The search and its effort."""

from benchmarks.papers.jap.jobs import random_array
from lightning_pipes.strategies.jap import Effort, solved
from lightning_pipes.strategies.jap.solvers.genetic import (
    evolved,
)
from lightning_pipes.strategies.jap.solvers.greedy import as_printed
from lightning_pipes.strategies.jap.solvers.rules import by_rule
from lightning_pipes.strategies.jap.solvers.search import searched


def test_the_clock_ends_a_search():
    looks = iter(range(10**6))
    found = searched(random_array(12, 4), Effort(10**9, lambda: next(looks) > 20))
    assert 0 < found.tried < 10_000


def test_search_beats_the_paper():
    """A small effort, which Python spends in seconds; see benchmarks/jap.py for a second of machine code."""
    problem = random_array(16, 8)
    found = searched(problem, Effort(1500))
    assert found.makespan < 0.95 * as_printed(problem).makespan
    assert found.makespan < 0.90 * evolved(problem, Effort(3000)).makespan


def test_effort_in_seconds():
    """Of a clock that goes on by one at each look."""
    ticks = iter(range(1000))
    effort = Effort.within(5, clock=lambda: next(ticks))
    assert [effort.left for _ in range(8)] == [True] * 5 + [False] * 3
    problem = random_array(8, 4)
    assert solved(problem, effort=0.05).makespan <= by_rule(problem, "pyramid").makespan
