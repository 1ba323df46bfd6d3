from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_pipes.cost import CostModel, Link
from lightning_pipes.ir import B, Cut, F, Instruction, Kind, Plan, Span
from lightning_pipes.strategies.umpipe.planner import spans_of_size
from lightning_pipes.strategies.umpipe.pricing import drifted_costs, link_times, room_of, stage_options

ROWS = 8
TABLES = {
    Kind.F: ((1, 5e-9), (2, 6e-9), (4, 9e-9), (8, 20e-9)),
    Kind.B: ((1, 9e-9), (2, 11e-9), (4, 17e-9), (8, 40e-9)),
}
COSTS = CostModel(
    {(kind, s): table for kind, table in TABLES.items() for s in range(2)},
    forward_bytes=(3.0,),
    backward_bytes=(5.0,),
    link=Link(bandwidth=1e9, latency=7e-9),
    activation_bytes=(10, 20),
    weight_bytes=(100, 100),
    working_bytes=(2.0, 2.0),
    overhead=1e-9,
)


@pytest.mark.parametrize("recompute", [(), (True, False)])
def test_options_cost_what_the_same_plan_costs(recompute: tuple[bool, ...]) -> None:
    """Compare the times of every option with the costs of the same chunks in a plan."""
    plain = Plan.even(2, 1, ROWS, recompute=recompute)
    for stage in range(2):
        options = stage_options(COSTS, plain, stage, (1, 2, 4, 8))
        assert len(options) == 16 + (6 if stage == 0 else 0)
        for option in options:
            spans = [spans_of_size(ROWS, 2), spans_of_size(ROWS, 2)], [spans_of_size(ROWS, 2), spans_of_size(ROWS, 2)]
            spans[0][stage], spans[1][stage] = spans_of_size(ROWS, option.forward), spans_of_size(ROWS, option.backward)
            whole = tuple(s == stage and option.whole for s in range(2))
            cut = Cut(ROWS, tuple(spans[0]), tuple(spans[1]))
            plan = Plan((0, 1), (cut,), recompute=recompute, whole_forward=whole)
            for span in plan.spans(Kind.F, stage):
                assert COSTS.duration_ns(F(stage, span), plan) + 1 == option.forward_time, option
            for span in plan.spans(Kind.B, stage):
                assert COSTS.duration_ns(B(stage, span), plan) + 1 == option.backward_time, option


def test_sizes_that_do_not_divide_each_other_are_not_an_option() -> None:
    options = stage_options(COSTS, Plan.even(2, 1, ROWS), 1, (2, 3, 6))
    assert {(o.forward, o.backward) for o in options} == {(2, 2), (3, 3), (6, 6), (2, 6), (6, 2), (3, 6), (6, 3)}


def test_messages_take_bytes_over_bandwidth_and_latency() -> None:
    assert link_times(COSTS, Plan.even(2, 1, ROWS), 0, (1, 4)) == ([10, 19], [12, 27])
    assert link_times(COSTS, Plan.even(2, 1, ROWS, ranks=(0, 0)), 0, (1, 4)) == ([0, 0], [0, 0])


def test_room_in_bytes() -> None:
    plain = Plan.even(2, 1, ROWS)
    assert [room_of(COSTS, plain, 0, limit, 4) for limit in (107, 108, 127, 128)] == [-1, 0, 1, 2]
    # Stage 1 recomputes nothing. Stage 0 keeps its input, which is part of the batch, and recomputes 4 samples.
    again = Plan.even(2, 1, ROWS, recompute=(True, False))
    assert [room_of(COSTS, again, 0, limit, 4) for limit in (147, 148)] == [-1, ROWS]


@pytest.mark.parametrize("arrives", [0.012, 0.02])
def test_link_times_equal_the_times_of_messages(arrives: float) -> None:
    """Check that the measured duration of a message, from start to arrival, includes the latency of the link."""
    usual = CostModel({(kind, s): ((1, 0.001),) for kind in (Kind.F, Kind.B) for s in (0, 1)}, (1000.0,), (1000.0,))
    usual = replace(usual, link=Link(bandwidth=1e6, latency=0.004))
    plan = Plan.even(2, 2, 16)
    rows = plan.spans(Kind.SF, 0)[0].rows
    found, change = drifted_costs(usual, CostModel({(Kind.SF, 0): ((rows, arrives),)}), plan)
    assert sum(found.transfer_ns(Instruction(Kind.SF, 0, span=Span(0, rows)), plan)) == pytest.approx(1e9 * arrives)
    assert change == pytest.approx(arrives / 0.012 - 1)  # 8 rows of 1000 bytes at 1 MB/s, and 4 ms
