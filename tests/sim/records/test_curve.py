"""Check the memory over the course of a timeline."""

from __future__ import annotations

import pytest

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import verify
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.planner import even_plan
from lightning_pipes.sim import simulate
from lightning_pipes.sim.records.memory_use import held_samples, memory_curves
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.testing.generators import uniform
from tests.cases import for_each


def test_by_hand():
    """Check two ranks and two micro-batches by hand, with f = 1 and b = 2.

    Rank 0 runs F at 0 and 1, and its first B starts at 4.
    """
    plan, costs = uniform(2, 2, f=1, b=2, activation_bytes=10)
    rank0, rank1 = memory_curves(simulate(OneFOneB().program(plan), plan, costs), costs)
    assert rank0 == ((0, 10), (1, 20), (6, 10), (9, 0))
    assert rank1 == ((0, 0), (1, 10), (4, 10), (7, 0))


@for_each("name", ["gpipe", "1f1b", "interleaved", "kfkb"])
@for_each("recompute", [False, True])
def test_its_peaks_are_the_simulators(name, recompute):
    schedule = make_schedule(name)
    plan = even_plan(schedule, 4, 6, 12, recompute)
    costs = CostModel.uniform(plan.n_stages, 1e-3, 2e-3, activation_bytes=100, weight_bytes=7, message_bytes=3)
    run = simulate(schedule.program(plan), plan, costs)
    curves = memory_curves(run, costs)
    assert tuple(max(size for _, size in curve) for curve in curves) == run.peak_bytes
    assert [curve[-1][1] for curve in curves] == [costs.resident_bytes(rank, plan) for rank in range(4)]
    for curve in curves:
        assert [t for t, _ in curve] == sorted({t for t, _ in curve})


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "kfkb"])
def test_held_samples_are_what_verify_proves(name):
    schedule = make_schedule(name)
    plan = even_plan(schedule, 3, 6, 12)
    order = schedule.program(plan)
    held = held_samples(simulate(order, plan, CostModel.uniform(plan.n_stages, 1e-3, 2e-3)))
    assert held == verify(order, plan).peak_rows


@pytest.mark.parametrize("k", [4, 6, 8])
def test_v_holds_no_more_than_its_limit(k):
    schedule = make_schedule("v", k=k)
    plan = even_plan(schedule, 4, 8, 16)
    held = held_samples(simulate(schedule.program(plan), plan, CostModel.uniform(8, 1e-3, 2e-3)))
    assert max(held) == k  # k half-stages of micro-batches of two samples
