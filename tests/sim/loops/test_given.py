"""Check the messages for programs that cannot be simulated, and for simulations that would be useless."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest

from lightning_pipes.cost import CostModel, Link
from lightning_pipes.ir import Cut, DeadlockError, InputError, Kind, Plan, Program, ProgramError, Span
from lightning_pipes.sim import cost_representatives, draw_spread, makespan, makespans, simulate
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.strategies.interleaved import Interleaved
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.testing.generators import tiny_plan
from tests.sim.policies import ByRule

PLAN = tiny_plan(3, 4)
COSTS = CostModel.uniform(3, 1e-3, 2e-3)
PROGRAM = OneFOneB().program(PLAN)


@pytest.mark.parametrize("call", [simulate, makespan, lambda *given: makespans(*given, None), draw_spread])
def test_schedule_is_not_a_program(call):
    with pytest.raises(TypeError, match=r"takes a Program.*got OneFOneB\(\).*schedule\.program\(plan\)"):
        call(OneFOneB(), PLAN, COSTS)
    with pytest.raises(TypeError, match=r"second argument of .* must be the plan of the order"):
        call(PROGRAM, COSTS, COSTS)


def test_priced_takes_no_schedule_either():
    with pytest.raises(TypeError, match="priced takes a Program"):
        cost_representatives(OneFOneB(), PLAN)


@pytest.mark.parametrize("order", [PROGRAM, ByRule()])
@pytest.mark.parametrize("stages", [0, 1, 2])
def test_a_model_of_too_few_stages(order, stages):
    costs = CostModel({key: table for key, table in COSTS.seconds.items() if key[1] < stages})
    with pytest.raises(InputError, match=f"times of {stages} stages and the plan has 3: there are no times of stage"):
        makespan(order, PLAN, costs)
    with pytest.raises(InputError, match=f"times of {stages} stages"):
        simulate(order, PLAN, replace(costs, activation_bytes=(1,) * stages))


def test_a_link_that_no_neighbours_use():
    costs = replace(COSTS, links={(0, 2): Link(latency=1.0), (1, 0): Link(latency=1e-3)})
    with pytest.warns(UserWarning, match=r"links has \(0, 2\), but no message.*\(0, 1\), \(1, 0\), \(1, 2\)"):
        assert makespan(PROGRAM, PLAN, costs) > makespan(PROGRAM, PLAN, COSTS)
    with pytest.warns(UserWarning, match=r"links has \(0, 7\)"):
        makespan(PROGRAM, PLAN, replace(COSTS, links={(0, 7): Link(latency=1.0)}))


def test_a_bandwidth_without_bytes():
    for costs in (replace(COSTS, link=Link(1e6)), replace(COSTS, links={(2, 1): Link(1e6)})):
        with pytest.warns(UserWarning, match="bandwidth of 1e.06 bytes a second, but messages have no bytes"):
            makespan(PROGRAM, PLAN, costs)


def test_nothing_is_said_of_a_model_that_fits():
    sends = {(Kind.SF, s): ((1, 1e-3),) for s in range(2)} | {(Kind.SB, s): ((1, 1e-3),) for s in (1, 2)}
    joined = {(a, b): Link(1e6) for a, b, _ in PLAN.directed_links}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for costs in (
            COSTS,
            CostModel.uniform(3, 1e-3, 2e-3, message_bytes=5, link=Link(1e6)),
            replace(COSTS, seconds={**COSTS.seconds, **sends}, link=Link(1e6)),
            replace(COSTS, forward_bytes=(1, 1), backward_bytes=(1, 1), links=joined),
            replace(COSTS, link=Link(latency=1e-3)),
        ):
            makespan(PROGRAM, PLAN, costs)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({(Kind.F, 0): 0.01}, r"seconds of F0 must be a table.*got 0\.01.*write \(\(1, 0\.01\),\)"),
        ({(Kind.STEP, 2): 3}, r"seconds of STEP2 must be a table.*write \(\(0, 3\),\)"),
        ({...: 0.01}, r"by kind and stage, as in \{\(Kind\.F, 0\): \(\(1, 0\.01\),\)\}; got the key Ellipsis"),
        ({Kind.F: ((1, 0.01),)}, "by kind and stage"),
        ([0.01], "seconds must be a mapping"),
    ],
)
def test_seconds_that_are_not_a_table(given, said):
    with pytest.raises(InputError, match=said):
        CostModel(given)


class TestProgramOfAnotherPlan:
    @pytest.mark.parametrize(
        ("program", "plan", "said"),
        [
            (OneFOneB().program(tiny_plan(2, 4)), PLAN, "has 2 rows, but the plan has 3 ranks"),
            (OneFOneB().program(tiny_plan(3, 8)), PLAN, r"has F0\[4:5\].*cuts F0 into 4 micro-batches of a batch of 4"),
            (OneFOneB().program(tiny_plan(3, 2)), PLAN, r"no rank has B0\[2:3\]"),
            (
                Interleaved(2).program(tiny_plan(4, 4, ranks=(0, 1, 0, 1))),
                tiny_plan(2, 4),
                "plan has 2 stages, counted from 0",
            ),
            (
                Interleaved(2).program(tiny_plan(4, 4, ranks=(0, 1, 0, 1))),
                tiny_plan(4, 4, ranks=(0, 1, 1, 0)),
                "has stage 2 on rank 1",
            ),
            (
                PROGRAM,
                Plan((0, 1, 2), (Cut(4, ((Span(0, 4),),) * 3),)),
                r"has F0\[0:1\], but the plan cuts F0 into 1 micro-batches",
            ),
        ],
    )
    def test_it_is_told(self, program, plan, said):
        costs = CostModel.uniform(plan.n_stages, 1e-3, 2e-3)
        for call in (simulate, makespan):
            with pytest.raises(ProgramError, match=said) as caught:
                call(program, plan, costs)
            assert "program was made for another plan" in str(caught.value)

    def test_ranks_that_wait_for_each_other_are_no_such_thing(self):
        rows = [list(row) for row in GPipe().program(tiny_plan(2, 2)).head]
        rows[1][0], rows[1][2] = rows[1][2], rows[1][0]  # a backward before its forward
        with pytest.raises(DeadlockError) as caught:
            makespan(Program(tuple(map(tuple, rows))), tiny_plan(2, 2), CostModel.uniform(2, 1e-3, 2e-3))
        assert "another plan" not in str(caught.value)
