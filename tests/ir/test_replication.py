"""Check how the samples of a micro-batch are divided among the ranks of a stage."""

from __future__ import annotations

import pytest

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import InputError, Plan, PlanError, verify
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.ir.replication import list_shares, replicate_plan, replicate_program, share_rows
from lightning_pipes.ir.schedule import Schedule
from lightning_pipes.planning.planner import Problem, solve_plan
from lightning_pipes.sim import simulate


def test_shares() -> None:
    assert share_rows(30, [1.0, 2.0]) == (20, 10)
    assert share_rows(7, [1.0, 1.0, 1.0]) == (3, 2, 2)
    assert share_rows(1, [1.0, 1.0], given=(1, 0)) == (0, 1)
    assert share_rows(4, [1.0, 9.0]) == (4, 0)
    assert [share_rows(rows, [1.0, 9.0], least=1) for rows in (4, 2, 1)] == [(3, 1), (1, 1), (1, 0)]
    assert list_shares(replicate_plan(Plan.even(2, 2, 8), [2, 1], [[1.0, 3.0], [1.0]])) == [[6, 2], [8]]
    with pytest.raises(InputError, match="above 0"):
        share_rows(4, [1.0, 0.0])


def test_order_and_messages() -> None:
    schedule = make_schedule("1f1b")
    assert isinstance(schedule, Schedule)
    base = Plan.even(2, 2, 8)
    plan = replicate_plan(base, [2, 1])
    program = replicate_program(schedule.program(base), plan)
    assert [[str(i) for i in row] for row in program.head] == [
        ["F0[0:2]", "F0[4:6]", "B0[0:2]", "B0[4:6]", "STEP0"],
        ["F0[2:4]", "F0[6:8]", "B0[2:4]", "B0[6:8]", "STEP0"],
        ["F1[0:4]", "B1[0:4]", "F1[4:8]", "B1[4:8]", "STEP1"],
    ]
    assert [
        plan.target_rank(e.instruction)
        for e in simulate(program, plan, CostModel.uniform(2, forward=1.0, backward=2.0)).transfers
    ].count(2) == 4
    with pytest.raises(PlanError, match="number of ranks for each stage"):
        replicate_plan(base, [2])


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "pipedream"])
def test_times_and_versions_equal_stages_with_one_rank(name: str) -> None:
    schedule = make_schedule(name)
    assert isinstance(schedule, Schedule)
    base = solve_plan(Problem(schedule, 3, 12, 4))
    plan, order = replicate_plan(base, [1, 3, 2], [[1.0], [1.0, 1.5, 2.0], [1.0, 1.0]]), schedule.program(base)
    program, costs = replicate_program(order, plan), CostModel.uniform(3, forward=1.0, backward=2.0)
    own, whole = verify(program, plan), verify(order, base)
    assert (own.versions, own.staleness) == (whole.versions, whole.staleness)
    times = [simulate(p.unroll(6), of, costs).makespan for p, of in ((program, plan), (order, base))]
    assert times[0] == times[1]  # here, a computation takes the same time for any number of samples
