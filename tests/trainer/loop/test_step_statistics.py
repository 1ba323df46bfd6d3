"""Tests of the statistics of the last batches, made from simulated events whose durations are known."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import InputError, Kind, Plan, Schedule
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.planner import Problem, solve_plan
from lightning_pipes.planning.replanning import Observation
from lightning_pipes.sim import simulate
from lightning_pipes.trainer.loop.step_statistics import (
    RankStatistics,
    StepStatistics,
    batches_left,
    merge_statistics,
    operations_of,
    sample_of,
)
from lightning_pipes.trainer.reports.report import Window

STAGES, ROWS = 2, 8


def of_rank(rank: int, plan: Plan, slow: float = 1.0, shown: int = 3, name: str = "1f1b") -> list[Window]:
    """Return the windows of a rank. In the second window, forwards on the last stage take `slow` seconds."""
    schedule = make_schedule(name)
    assert isinstance(schedule, Schedule)
    order = schedule.program(plan)
    found = []
    for n in range(shown):
        costs = CostModel.uniform(STAGES, forward=1.0, backward=2.0)
        if n == 1:
            costs = replace(costs, seconds={**costs.seconds, (Kind.F, 1): ((1, slow),)})
        batches = 3 if order.is_endless else None
        events = [e for e in simulate(order, plan, costs, batches=batches).events if e.rank == rank]
        found.append(Window(plan, order, events))
    return found


def plan_of(name: str = "1f1b") -> Plan:
    return solve_plan(Problem(make_schedule(name), STAGES, ROWS, 4))


def test_operations_are_tables_of_batches_by_spans() -> None:
    found = operations_of(of_rank(1, plan_of(), slow=5.0))
    assert sorted(found) == [(Kind.B, 1), (Kind.F, 1), (Kind.STEP, 1)]
    assert found[Kind.F, 1].tolist() == [[1.0] * 4, [5.0] * 4, [1.0] * 4]
    assert found[Kind.B, 1].tolist() == [[2.0] * 4] * 3
    assert found[Kind.STEP, 1].tolist() == [[0.0]] * 3


def test_batches_of_a_stream_are_counted_through_its_windows() -> None:
    found = operations_of(of_rank(1, plan_of("pipedream"), slow=5.0, name="pipedream"))
    assert found[Kind.F, 1].tolist() == [[1.0] * 4] * 3 + [[5.0] * 4] * 3 + [[1.0] * 4] * 3


def sights(plan: Plan, slow: tuple[float, ...], free: tuple[int | None, ...] = (None, 7)) -> list[RankStatistics]:
    """Return the statistics of all ranks of one or two replicas, whose last stages are on global ranks 0 and 2."""
    found = []
    for replica, factor in enumerate(slow):
        for rank in (1, 0):
            own = of_rank(rank, plan, factor)
            device = {"wait": 0.25 * (1 + replica + rank), "silent": math.nan}
            samples = [sample_of(a, b) for a, b in pairwise(own)]
            found.append(RankStatistics(samples, operations_of(own), device, free[rank]))
    return found


def test_of_replicas_the_slowest_counts() -> None:
    plan = plan_of()
    alone = merge_statistics(sights(plan, (3.0,)), [[0, 1]], plan)
    both = merge_statistics(sights(plan, (1.0, 3.0)), [[0, 1], [2, 3]], plan)
    assert alone is not None
    assert both is not None
    assert alone.matches_plan(plan)
    assert both.operations[Kind.F, 1].tolist() == alone.operations[Kind.F, 1].tolist()
    assert both.operations[Kind.F, 1][1].tolist() == [3.0] * 4
    assert both.costs.seconds_at(Kind.F, 1, 2) == alone.costs.seconds_at(Kind.F, 1, 2)
    assert [d["wait"] for d in alone.devices] == [0.25, 0.5]
    assert [d["wait"] for d in both.devices] == [0.375, 0.625]
    assert all(math.isnan(d["silent"]) for d in both.devices)
    assert both.free == (None, 7)


def test_ranks_of_a_stream_are_at_different_batches() -> None:
    """Check that only the last batches count, in the number that all ranks have seen."""
    plan = plan_of()
    whole = sights(plan, (3.0,))
    last, first = whole
    fewer = first._replace(samples=first.samples[1:], operations={k: t[1:] for k, t in first.operations.items()})
    found = merge_statistics([last, fewer], [[0, 1]], plan)
    assert found is not None
    assert found.matches_plan(plan)
    assert found.operations[Kind.F, 1].tolist() == [[3.0] * 4, [1.0] * 4]
    assert merge_statistics([last, first._replace(samples=[])], [[0, 1]], plan) is None


def looks(answers: list[Any]) -> StepStatistics:
    """Return the statistics of a single process, which runs a pipeline of one stage."""
    control = SimpleNamespace(all_gather=lambda thing: [thing])
    ranks: Any = SimpleNamespace(control=control, grid=SimpleNamespace(pipelines=((0,),)))
    made = StepStatistics(ranks)
    made.monitor = SimpleNamespace(since_last=lambda: answers.pop(0))
    return made


def test_observations_belong_to_the_running_plan() -> None:
    """Check that only observations of the current plan are returned, and that windows of other plans are left out."""
    plan = solve_plan(Problem(make_schedule("1f1b"), 1, ROWS, 2))
    other = replace(plan)
    seen = looks([({"wait": float(n)}, n) for n in range(5)])

    def windows(of: Plan, count: int) -> None:
        schedule = make_schedule("1f1b")
        assert isinstance(schedule, Schedule)
        order = schedule.program(of)
        for _ in range(count):
            seen.add(Window(of, order, simulate(order, of, CostModel.uniform(1, 1.0, 2.0)).events))

    assert seen.observe_plan(plan) == ()
    windows(plan, 3)
    (first,) = seen.observe_plan(plan)
    assert (first.batches, first.devices[0]["wait"], first.free) == (3, 0.0, (0,))
    windows(plan, 4)
    before, second = seen.observe_plan(plan)
    assert (before, second.batches) == (first, 4)
    windows(plan, 2)
    windows(other, 1)
    assert seen.observe_plan(other) == ()  # windows of a short batch
    *_, third = seen.observe_plan(plan)
    assert (third.batches, third.devices[0]["wait"]) == (2, 2.0)
    windows(plan, 1)
    windows(other, 2)
    (third,) = seen.observe_plan(other)
    assert (third.batches, third.devices[0]["wait"]) == (2, 3.0)


def test_a_window_that_contradicts_itself_is_refused() -> None:
    costs = CostModel.uniform(1, 1.0, 2.0)
    with pytest.raises(InputError, match="batches by spans"):
        Observation(costs, {(Kind.SF, 0): np.zeros((1, 1))})
    with pytest.raises(InputError, match="2 devices were observed"):
        Observation(costs, devices=({}, {}), free=(1,))
    assert not Observation(costs).matches_plan(plan_of())


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_steps": -1, "max_epochs": -1}, None),
        ({"max_steps": 100, "max_epochs": -1}, 160),
        ({"max_steps": -1, "max_epochs": 4}, 25),
        ({"max_steps": 22, "max_epochs": 4}, 4),
        ({"max_steps": 10, "max_epochs": 4}, 0),
    ],
)
def test_batches_left(limits: dict[str, int], expected: int | None) -> None:
    loop = SimpleNamespace(batch_idx=5)
    at = {"global_step": 20, "accumulate_grad_batches": 2, "current_epoch": 1, "num_training_batches": 10}
    trainer: Any = SimpleNamespace(**limits, **at, fit_loop=loop)
    assert batches_left(trainer) == expected
