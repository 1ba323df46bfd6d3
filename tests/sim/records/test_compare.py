"""Check the comparison of two timelines."""

import pytest

from lightning_pipes.ir import B, F, Instruction, Kind
from lightning_pipes.sim import Event, Timeline, compare_timelines, simulate
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.testing.generators import tiny_plan, uniform
from tests.sim.timelines import ONE, PLAN, TIMELINE


def test_compare():
    slower = simulate(OneFOneB().program(PLAN), PLAN, uniform(2, 3, f=3, b=4, step=2, link=1, latency=1)[1])
    result = compare_timelines(TIMELINE, slower)
    assert result.makespan == (TIMELINE.makespan, slower.makespan)
    assert result.error == pytest.approx(TIMELINE.makespan / slower.makespan - 1)
    assert result.error < 0
    assert result.medians[Kind.F, 0] == (2, 3)
    assert result.medians[Kind.SF, 0] == (2, 2)
    assert result.moved == 0
    assert "F0: 2 ns predicted, 3 ns measured (-33.3%)" in str(result).splitlines()


def test_compare_counts_what_ran_in_another_order():
    a, b = F(0, ONE), B(0, ONE)
    plan = tiny_plan(1, 1)
    one = Timeline.from_events([Event(0, a, 0, 1), Event(0, b, 1, 2), Event(0, Instruction(Kind.STEP, 0), 2, 3)], plan)
    other = Timeline.from_events(
        [Event(0, b, 0, 1), Event(0, a, 1, 2), Event(0, Instruction(Kind.STEP, 0), 2, 3)], plan
    )
    assert compare_timelines(one, other).moved == pytest.approx(2 / 3)
