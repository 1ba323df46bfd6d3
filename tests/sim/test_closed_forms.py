"""Compare the simulator with the papers' closed forms for uniform stages and free links, to the nanosecond."""

from itertools import product

import pytest

from lightning_pipes.sim import makespan, simulate
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.strategies.interleaved import Interleaved
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.testing.generators import uniform
from tests.cases import for_each

TIMES = [(1, 2), (7, 5), (12, 12)]


@for_each("p", [1, 2, 3, 4, 5, 8])
def test_gpipe_and_1f1b(p, kernel):
    """Check that m micro-batches on p stages take (m + p - 1)(f + b), so that every rank idles (p - 1)(f + b)."""
    for m, (f, b) in product([1, 2, 3, 7, 8, 16, 31], TIMES):
        plan, costs = uniform(p, m, f=f, b=b)
        for schedule in (GPipe(), OneFOneB()):
            assert makespan(schedule.program(plan), plan, costs) == (m + p - 1) * (f + b), (schedule, m)


@for_each("v", [1, 2, 3, 4])
@for_each("p", [2, 3, 4, 8])
def test_interleaved(p, v):
    """Check that the bubble is (p - 1)(f + b) / v for v stages per rank if p divides m.

    In the formula, f and b are the times of a rank.
    """
    for rounds, (f, b) in product([1, 2, 4], TIMES[1:]):
        m = rounds * p
        plan, costs = uniform(p * v, m, f=f, b=b, ranks=tuple(range(p)) * v)  # so a rank takes v f and v b
        timeline = simulate(Interleaved(v).program(plan), plan, costs)
        assert timeline.busy == (m * v * (f + b),) * p
        assert timeline.makespan - timeline.busy[0] == (p - 1) * (f + b), m


@pytest.mark.parametrize("p", [2, 4, 8])
def test_where_p_does_not_divide_m_interleaving_leaves_more_than_its_formula_and_less_than_1f1b(p):
    for m, v in product([p + 1, 2 * p - 1, 3 * p + 1], [2, 3]):
        plan, costs = uniform(p * v, m, f=1, b=2, ranks=tuple(range(p)) * v)
        bubble = makespan(Interleaved(v).program(plan), plan, costs) - m * v * 3
        assert (p - 1) * 3 <= bubble <= (p - 1) * 3 * v, m
