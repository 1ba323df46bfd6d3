import pytest

from lightning_pipes.ir import Cut, Plan, PlanError, even_spans, verify
from lightning_pipes.sim import simulate
from lightning_pipes.strategies.interleaved import Interleaved
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.testing.conformance import ScheduleConformance
from lightning_pipes.testing.generators import tiny_plan, uniform
from tests.cases import for_each


class TestInterleaved(ScheduleConformance):
    schedules = [Interleaved(1), Interleaved(2), Interleaved(3)]
    refused = [
        lambda: Interleaved(0),
        lambda: Interleaved(2).program(tiny_plan(4, 4)),
        lambda: Interleaved(2).program(tiny_plan(4, 4, ranks=(0, 0, 1, 1))),
    ]


def test_small_order():
    program = Interleaved(2).program(tiny_plan(4, 2, ranks=(0, 1, 0, 1)))
    assert program.to_lines() == [
        "F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1 STEP0 STEP2",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1 STEP1 STEP3",
    ]


@for_each("v", [1, 2, 3, 4])
@for_each("rounds", [1, 2, 3])
@for_each("p", [2, 3, 4, 8])
def test_bubble(p, rounds, v):
    """Check that the bubble is (p - 1)(f + b) / v if m is a multiple of p (section 2.2).

    In the formula, f and b are the times of all stages of a rank.
    """
    m, f, b = p * rounds, 1, 2  # times of one of the v stages
    plan, costs = uniform(p * v, m, f, b, ranks=tuple(range(p)) * v)
    timeline = simulate(Interleaved(v).program(plan), plan, costs)
    assert timeline.busy == (m * v * (f + b),) * p
    assert timeline.makespan - timeline.busy[0] == (p - 1) * (f + b)


@for_each("c", [0, 1, 2, 4])
@for_each(("p", "v", "m"), [(4, 2, 8), (4, 2, 16), (8, 2, 16), (4, 4, 16)])
def test_transfers_show_only_on_the_way_there_and_back(p, v, m, c):
    """Check that links delay only the first forward on its way down and the last gradient on its way back.

    Rank r runs 2 (p - 1 - r) forwards for the warm-up, so a message travels while the rank computes the micro-batch
    before it.
    """
    plan, costs = uniform(p * v, m, f=4, b=8, link=c, ranks=tuple(range(p)) * v)
    assert simulate(Interleaved(v).program(plan), plan, costs).makespan == (m * v + p - 1) * 12 + 2 * (p * v - 1) * c


@for_each("m", [1, 2, 3, 5, 6, 7, 9, 11])
def test_any_number_of_microbatches_is_not_slower_than_1f1b(m):
    plan, costs = uniform(8, m, f=1, b=2, ranks=(0, 1, 2, 3) * 2)
    flat, flat_costs = uniform(4, m, f=2, b=4)
    interleaved = simulate(Interleaved(2).program(plan), plan, costs).makespan
    assert interleaved <= simulate(OneFOneB().program(flat), flat, flat_costs).makespan


def test_one_stage_a_rank_is_1f1b():
    plan = tiny_plan(4, 7)
    assert Interleaved(1).program(plan) == OneFOneB().program(plan)


def test_refuses_spans_that_differ_between_its_stages():
    four, two = even_spans(4, 4), even_spans(4, 2)
    plan = Plan((0, 1, 0, 1), (Cut(4, (four, four, four, two)),))
    with pytest.raises(PlanError, match="same spans"):
        Interleaved(2).program(plan)


def test_holds_more_than_1f1b():
    plan = tiny_plan(4, 8, ranks=(0, 1, 0, 1))
    held = verify(Interleaved(2).program(plan), plan).peak_spans
    assert held[0] + held[2] > 2  # 1F1B holds two on the first of two ranks
