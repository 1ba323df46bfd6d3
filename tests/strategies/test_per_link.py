from dataclasses import replace

import pytest

from lightning_pipes.ir import Kind, verify
from lightning_pipes.sim import simulate
from lightning_pipes.strategies.deep import Deep
from lightning_pipes.strategies.kfkb import KFKB
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.strategies.per_link import PerLink, extra_for
from lightning_pipes.testing.conformance import ScheduleConformance
from lightning_pipes.testing.generators import tiny_plan, uniform


class TestPerLink(ScheduleConformance):
    schedules = [PerLink(), PerLink(extra=(0, 2, 1)), PerLink(extra=(9, 0, 0))]
    refused = [
        lambda: PerLink(extra=(1, -1)),
        lambda: PerLink(extra=(1, 1)).program(tiny_plan(4, 4)),
        lambda: PerLink().program(tiny_plan(4, 4, ranks=(0, 1, 0, 1))),
    ]
    ranks = (4,)

    def plan(self, schedule, ranks, microbatches):
        return super().plan(schedule, 4, microbatches)

    def most_held(self, schedule, plan, stage):
        return min(4 - stage + sum(schedule.extra[stage:]), len(plan.jobs[0].forward[0]))


def test_small_order():
    assert PerLink(extra=(1, 0)).program(tiny_plan(stages=3, microbatches=4)).to_lines() == [
        "F0.0 F0.1 F0.2 F0.3 B0.0 B0.1 B0.2 B0.3 STEP0",
        "F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3 STEP1",
        "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3 STEP2",
    ]


@pytest.mark.parametrize("p", [1, 2, 4])
def test_without_extra_it_is_1f1b(p):
    plan = tiny_plan(p, 6)
    assert PerLink().program(plan) == PerLink(extra=(0,) * (p - 1)).program(plan) == OneFOneB().program(plan)


def one_slow_link(p=4, m=24, f=20, b=40, slow=1, link=60):
    plan, costs = uniform(p, m, f=f, b=b)
    times = {(Kind.SF, slow): ((1, link * 1e-9),), (Kind.SB, slow + 1): ((1, link * 1e-9),)}
    return plan, replace(costs, seconds={**costs.seconds, **times})


def test_full_speed_with_half_the_activations():
    """Check that six micro-batches on the first stage reach full speed if only the middle link is slow.

    KFKB does not reach this speed with any k, and its best k holds at least 12 micro-batches there.
    """
    plan, costs = one_slow_link()
    program = PerLink(extra_for(plan, costs)).program(plan)
    assert simulate(program, plan, costs).makespan == (24 + 3) * 60 + 2 * 60  # one message in each direction adds to it
    assert verify(program, plan).peak_spans == (6, 5, 2, 1)
    best = min((KFKB(k).program(plan) for k in range(1, 25)), key=lambda p: simulate(p, plan, costs).makespan)
    assert simulate(best, plan, costs).makespan > 2300
    assert verify(best, plan).peak_spans[0] >= 12


@pytest.mark.parametrize(("slow", "extra"), [(0, (2, 0, 0)), (1, (0, 2, 0)), (2, (0, 0, 2))])
def test_extra_only_where_the_link_is_slow(slow, extra):
    plan, costs = one_slow_link(slow=slow)
    assert extra_for(plan, costs) == extra


def test_equal_links_need_what_the_first_stage_needs():
    """Check that equal links need 2 (p - 1) c / (f + b) extra micro-batches in total, rounded up."""
    for c in range(0, 61, 5):
        plan, costs = uniform(4, 24, f=20, b=40, link=c)
        assert sum(extra_for(plan, costs)) == -(-6 * c // 60)
        assert sum(extra_for(plan, costs, times=2)) == -(-12 * c // 60)


def test_a_link_that_is_the_bottleneck_needs_a_round_trip_and_no_more():
    """Check that a link which is always busy adds only one round trip.

    No number of micro-batches in flight hides such a link. Its own time per message counts instead of the times of the
    stages.
    """
    plan, costs = uniform(2, 24, f=1, b=1, link=1000)
    assert extra_for(plan, costs) == (2,)


def test_one_stage_and_stages_of_one_rank_have_no_links():
    assert extra_for(*uniform(1, 4, f=1, b=2, link=9)) == ()
    assert extra_for(*uniform(2, 4, f=1, b=2, link=9, ranks=(0, 0))) == (0,)


def test_latency_counts():
    plan, costs = uniform(3, 12, f=20, b=40, latency=60)
    assert extra_for(plan, costs) == (2, 2)
    program = PerLink(extra_for(plan, costs)).program(plan)
    assert simulate(program, plan, costs).makespan == simulate(Deep(4).program(plan), plan, costs).makespan
