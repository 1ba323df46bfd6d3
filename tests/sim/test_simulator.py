"""Compare random makespans with individual simulations and with theory."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from lightning_pipes.cost import CostModel, Link
from lightning_pipes.ir import InputError, Kind
from lightning_pipes.sim import draw_spread, makespan, simulate
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.testing.generators import tiny_plan
from tests.sim.policies import Asked, ByRule

RARE = {(Kind.F, 0): (1.0,) * 19 + (11.0,)}
"""Ratios in which one of twenty forwards of stage 0 takes eleven times as long, which does not change the median."""


def test_one_stage_by_theory():
    """Check m consecutive forwards, each with an expected time of 1.5 times its median."""
    plan = tiny_plan(1, 8)
    costs = replace(CostModel.uniform(1, 1e-6, 0.0), scatter=RARE)
    found = draw_spread(GPipe().program(plan), plan, costs, draws=4000, seed=3)
    assert found.steady == 8_000
    assert found.mean == pytest.approx(8 * 1500, rel=0.03)
    exact = {0: 0.95**8, 1: 8 * 0.05 * 0.95**7}  # the probability of this number of slow forwards
    for slow, share in exact.items():
        assert found.nanoseconds.count(8_000 + 10_000 * slow) / 4000 == pytest.approx(share, abs=0.025)
    assert found.quantile(0.0) == found.quantile(0.5) == 8_000
    assert found.quantile(0.9) == 18_000
    assert found.quantile(1.0) == max(found.nanoseconds)


@pytest.mark.parametrize("order", [OneFOneB(), ByRule(), Asked(ByRule())], ids=["fixed", "rule", "asked"])
@pytest.mark.parametrize("regime", ["asynchronous", "shared"])
def test_every_draw_is_a_simulation_of_its_own(order, regime, kernel):
    """Check draws that are known exactly, because every operation has only one ratio."""
    plan = tiny_plan(3, 4)
    program = order.program(plan) if isinstance(order, OneFOneB) else order
    costs = CostModel.uniform(3, 2e-9, 4e-9, message_bytes=3, link=Link(1e9), regime=regime)
    drawn = replace(costs, scatter={(kind, s): (3.0,) for kind in (Kind.F, Kind.SB) for s in range(3)})
    slow = {
        key: tuple((r, 3 * t) for r, t in table) if key[0] is Kind.F else table for key, table in costs.seconds.items()
    }
    other = replace(costs, seconds=slow, backward_bytes=(9.0, 9.0))
    found = draw_spread(program, plan, drawn, draws=5)
    assert found.nanoseconds == (makespan(program, plan, other),) * 5
    assert found.steady == makespan(program, plan, costs)


def test_rare_slow_operations_cost_a_pipeline_more_than_their_share():
    """Check that a step grows by more than one half, although the mean time of each stage grows by one half.

    At each moment, the pipeline waits for the slowest stage.
    """
    plan = tiny_plan(4, 8)
    costs = CostModel.uniform(4, 1e-6, 2e-6)
    rare = {(kind, s): (1.0,) * 19 + (11.0,) for kind in (Kind.F, Kind.B) for s in range(4)}
    found = draw_spread(OneFOneB().program(plan), plan, replace(costs, scatter=rare))
    assert found.mean > 1.5 * found.steady
    assert "on average" in str(found)


def test_the_same_for_the_same_seed():
    plan = tiny_plan(2, 4)
    costs = replace(CostModel.uniform(2, 1e-6, 1e-6), scatter=RARE)
    program = OneFOneB().program(plan)
    assert draw_spread(program, plan, costs, seed=1) == draw_spread(program, plan, costs, seed=1)
    assert draw_spread(program, plan, costs, seed=1) != draw_spread(program, plan, costs, seed=2)


def test_measured_ratios_are_those_to_the_median_of_their_size():
    """Check micro-batches of two sizes, as in UMPipe: a larger micro-batch is not counted as scatter."""
    plan = tiny_plan(2, 3)
    rng = random.Random(5)
    program = OneFOneB().program(plan)
    each = {i: rng.randrange(10, 90) * 1e-9 for i in program.iter_instructions()}
    timeline = simulate(program, plan, replace(CostModel.uniform(2, 0.0, 0.0), each=each))
    costs = CostModel.from_timelines(timeline)
    took = sorted(seconds for i, seconds in each.items() if i.kind is Kind.F and i.stage == 1)
    assert sorted(costs.scatter[Kind.F, 1]) == pytest.approx([t / took[1] for t in took])
    assert draw_spread(program, plan, costs).nanoseconds[0] > 0


def test_nothing_to_draw_from():
    plan = tiny_plan(2, 2)
    with pytest.raises(InputError, match="no scatter to draw from"):
        draw_spread(GPipe().program(plan), plan, CostModel.uniform(2, 1, 1))
