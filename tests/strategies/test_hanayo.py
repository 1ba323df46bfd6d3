import pytest

from lightning_pipes.ir import Cut, Plan, PlanError, even_spans, verify
from lightning_pipes.sim import simulate
from lightning_pipes.strategies.hanayo import Hanayo
from lightning_pipes.strategies.interleaved import Interleaved
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.testing.conformance import ScheduleConformance
from lightning_pipes.testing.generators import tiny_plan, uniform
from tests.cases import for_each


class TestHanayo(ScheduleConformance):
    schedules = [Hanayo(1), Hanayo(2), Hanayo(3)]
    refused = [
        lambda: Hanayo(0),
        lambda: Hanayo(1).program(tiny_plan(4, 4)),
        lambda: Hanayo(1).program(tiny_plan(4, 4, ranks=(0, 1, 0, 1))),
        lambda: Hanayo(2).program(tiny_plan(4, 4, ranks=(0, 1, 1, 0))),
    ]


def test_small_order():
    program = Hanayo(1).program(tiny_plan(4, 2, ranks=(0, 1, 1, 0)))
    assert program.to_lines() == [
        "F0.0 F0.1 F3.0 B3.0 F3.1 B3.1 B0.0 B0.1 STEP0 STEP3",
        "F1.0 F2.0 F1.1 F2.1 B2.0 B1.0 B2.1 B1.1 STEP1 STEP2",
    ]


def test_placement():
    assert Hanayo(1).place_stages(3) == (0, 1, 2, 2, 1, 0)
    assert Hanayo(2).place_stages(2) == (0, 1, 1, 0, 0, 1, 1, 0)


def bubble(p, m, waves, f, b):
    schedule = Hanayo(waves)
    plan, costs = uniform(2 * p * waves, m, f, b, ranks=schedule.place_stages(p))
    timeline = simulate(schedule.program(plan), plan, costs)
    assert timeline.busy == (m * 2 * waves * (f + b),) * p
    return timeline.makespan - timeline.busy[0]


@for_each(("f", "b"), [(1, 1), (1, 2), (3, 2), (3, 5)])  # times of one of the 2 w stages of a rank
@for_each("waves", [1, 2, 3])
@for_each("rounds", [1, 2, 3])
@for_each("p", [1, 2, 3, 4, 6])
def test_bubble(p, rounds, waves, f, b):
    """Check that the bubble is (p - 1) max(f, b) / w for the f and b of a whole rank.

    The bubble is never smaller than the time in which the pipeline fills and drains.
    """
    found = bubble(p, p * rounds, waves, f, b)
    assert found == (p - 1) * 2 * max(f, b)
    assert found >= (p - 1) * (f + b)


@for_each("waves", [1, 2])
@for_each("m", [1, 2, 3, 5, 6, 7, 9, 11])
def test_any_number_of_microbatches_is_not_slower_than_1f1b(m, waves):
    plan, costs = uniform(4, m, f=2 * waves, b=4 * waves)
    flat = simulate(OneFOneB().program(plan), plan, costs)
    assert bubble(4, m, waves, 1, 2) <= flat.makespan - flat.busy[0]


@pytest.mark.parametrize(("p", "waves"), [(4, 1), (4, 2), (8, 1)])
def test_compared_with_interleaved_with_the_same_number_of_stages(p, waves):
    """Compare with interleaved 1F1B that has the same number of stages.

    Hanayo sends no messages where a wave turns, and its fullest rank holds the same number of activations.
    """
    wave, turn = Hanayo(waves), Interleaved(2 * waves)
    ours, theirs = (tiny_plan(2 * p * waves, 4 * p, ranks=s.place_stages(p)) for s in (wave, turn))
    assert sum(map(ours.is_remote_edge, range(ours.n_stages - 1))) == theirs.n_stages - 1 - (2 * waves - 1)
    assert max(held_by_rank(wave, ours)) == max(held_by_rank(turn, theirs))


def held_by_rank(schedule, plan):
    costs = uniform(plan.n_stages, 4, 1, 2, activation_bytes=1)[1]
    return simulate(schedule.program(plan), plan, costs).peak_bytes


@pytest.mark.parametrize("waves", [1, 2])
def test_holds(waves):
    """Check that rank r holds the activations of p + r / 2w micro-batches over all of its stages.

    The first rank of 1F1B holds p micro-batches.
    """
    schedule = Hanayo(waves)
    plan = tiny_plan(2 * 4 * waves, 16, ranks=schedule.place_stages(4))
    assert held_by_rank(schedule, plan) == tuple(2 * 4 * waves + r for r in range(4))


def test_refuses_spans_that_differ_between_its_stages():
    four, two = even_spans(4, 4), even_spans(4, 2)
    with pytest.raises(PlanError, match="same spans"):
        Hanayo(1).program(Plan((0, 1, 1, 0), (Cut(4, (four, four, four, two)),)))


@pytest.mark.parametrize("waves", [1, 2, 3])
@pytest.mark.parametrize("p", [5, 7])
def test_no_number_of_microbatches_gets_stuck(p, waves):
    for m in range(1, 2 * p + 3):
        schedule = Hanayo(waves)
        plan = tiny_plan(2 * p * waves, m, ranks=schedule.place_stages(p))
        verify(schedule.program(plan), plan)
