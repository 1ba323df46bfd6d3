from dataclasses import replace
from itertools import product

import pytest

from lightning_pipes.cost import Link
from lightning_pipes.ir import STEP, F, I, Kind, Plan, PlanError, Program, W, adapt_plan, verify
from lightning_pipes.planning.bounds import least_step
from lightning_pipes.sim import makespan, simulate
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.strategies.per_link import PerLink, extra_for
from lightning_pipes.strategies.ready import Ready
from lightning_pipes.strategies.zero_bubble import ZeroBubble
from lightning_pipes.testing.conformance import ScheduleConformance
from lightning_pipes.testing.generators import tiny_plan, uniform
from tests.cases import for_each


class TestZeroBubble(ScheduleConformance):
    schedules = [ZeroBubble()]
    refused = [
        lambda: ZeroBubble().program(tiny_plan(4, 4)),
        lambda: ZeroBubble().program(adapt_plan(tiny_plan(4, 4, ranks=(0, 1, 0, 1)), ZeroBubble())),
    ]

    def most_held(self, schedule, plan, stage):
        return min(plan.n_stages, len(plan.jobs[0].forward[0]))


class TestLongerWarmUp(ScheduleConformance):
    schedules = [
        ZeroBubble((0, 2, 1)),
        ZeroBubble((1, 1, 1)),
        ZeroBubble((9, 0, 0), limits=(5, 7, 3, 4)),
        ZeroBubble(limits=(2, 1, 4, 8)),
    ]
    refused = [
        lambda: ZeroBubble((1, -1)),
        lambda: ZeroBubble(limits=(0, 1)),
        lambda: ZeroBubble((1, 1)).program(split(tiny_plan(4, 4))),
        lambda: ZeroBubble(limits=(4, 4)).program(split(tiny_plan(3, 4))),
        lambda: ZeroBubble(limits=(2, 1)).program(split(Plan.even(2, 2, rows=4))),
    ]
    ranks = (4,)

    def plan(self, schedule, ranks, microbatches):
        return super().plan(schedule, 4, microbatches)

    def most_held(self, schedule, plan, stage):
        room = schedule.limits[stage] if schedule.limits else 4 + sum(schedule.extra)
        return min(room, len(plan.jobs[0].forward[0]))


def split(plan):
    return replace(plan, split_backward=True)


def test_small_order():
    program = ZeroBubble().program(split(tiny_plan(stages=2, microbatches=3)))
    assert program.to_lines() == [
        "F0.0 F0.1 I0.0 W0.0 F0.2 I0.1 W0.1 I0.2 W0.2 STEP0",
        "F1.0 I1.0 F1.1 I1.1 W1.0 F1.2 I1.2 W1.1 W1.2 STEP1",
    ]


def bubble(p, m, f, i, w):
    plan, costs = uniform(p, m, f=f, b=i + w, w=w)
    plan = split(plan)
    timeline = simulate(ZeroBubble().program(plan), plan, costs)
    assert timeline.busy == (m * (f + i + w),) * p
    return timeline.makespan - timeline.busy[0]


@for_each(("f", "i", "w"), [(1, 1, 1), (2, 2, 1), (3, 2, 2), (10, 14, 9), (5, 4, 0)])
@for_each("extra", [0, 1, 7])
@for_each("p", [1, 2, 3, 4, 8])
def test_bubble_of_the_paper(p, extra, f, i, w):
    """Check that the bubble is (p - 1)(f + b_I - w), as in table 2."""
    assert bubble(p, p + extra, f, i, w) == (p - 1) * (f + i - w)


@for_each(("f", "i", "w"), [(1, 1, 2), (2, 2, 3), (1, 3, 2), (3, 1, 2), (1, 4, 9), (0, 1, 1)])
@for_each("p", [1, 2, 3, 4, 8])
def test_bubble_if_weights_take_longer(p, f, i, w):
    assert bubble(p, 2 * p, f, i, w) == (p - 1) * max(f + i - w, f, i)


@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_bubble_of_few_microbatches(m):
    """Check the bubble if the m - 1 available W are too few to fill the idle time."""
    assert bubble(4, m, 2, 2, 1) == 3 * (2 + 2) - (m - 1) * 1


def all_orders(p, m):
    """Return the plan and every program of p stages that `ZeroBubble` is compared with.

    In these programs, each kind runs in the order of micro-batches, and a stage holds at most p micro-batches between F
    and W.
    """

    def rows(stage, spans, f=0, i=0, w=0):
        if w == m:
            yield (STEP(stage),)
            return
        if f < m and f - w < p:
            yield from ((F(stage, spans[f]), *rest) for rest in rows(stage, spans, f + 1, i, w))
        if i < f:
            yield from ((I(stage, spans[i]), *rest) for rest in rows(stage, spans, f, i + 1, w))
        if w < i:
            yield from ((W(stage, spans[w]), *rest) for rest in rows(stage, spans, f, i, w + 1))

    plan = split(tiny_plan(p, m))
    spans = plan.spans(Kind.F, 0)
    return plan, product(*(list(rows(s, spans)) for s in range(p)))


@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2), (2, 3, 1)])
def test_no_order_with_its_memory_is_faster(f, i, w):
    plan, orders = all_orders(2, 3)
    _, costs = uniform(2, 3, f=f, b=i + w, w=w)
    best = min(makespan(Program(rows), plan, costs) for rows in orders if runs(rows, plan))
    assert makespan(ZeroBubble().program(plan), plan, costs) == best


def runs(rows, plan):
    """Return whether the program of two stages finishes.

    It does not finish if the first stage waits for a gradient whose activation it has not sent.
    """
    try:
        makespan(Program(rows), plan, uniform(2, 3, f=1, b=2)[1])
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 4), (4, 16), (8, 24)])
def test_is_faster_than_1f1b_and_holds_no_more(p, m):
    plan, costs = uniform(p, m, f=1, b=2)
    whole = simulate(OneFOneB().program(plan), plan, replace(costs, activation_bytes=(10,) * p))
    parts = simulate(ZeroBubble().program(split(plan)), split(plan), replace(costs, activation_bytes=(10,) * p))
    assert whole.makespan - parts.makespan == 2 * (p - 1)
    assert max(parts.peak_bytes) == max(whole.peak_bytes)


def test_every_stage_holds_as_many_as_there_are_stages():
    plan = split(tiny_plan(4, 9))
    assert verify(ZeroBubble().program(plan), plan).peak_spans == (4, 4, 4, 4)


def test_the_plan_is_prepared():
    plan = Plan.even(2, 4)
    assert adapt_plan(plan, ZeroBubble()) == split(plan)
    assert adapt_plan(split(plan), OneFOneB()) == plan


def test_small_order_with_a_longer_warm_up():
    plan = split(tiny_plan(stages=2, microbatches=4))
    assert ZeroBubble((1,)).program(plan).to_lines() == [
        "F0.0 F0.1 F0.2 I0.0 W0.0 F0.3 I0.1 W0.1 I0.2 W0.2 I0.3 W0.3 STEP0",
        "F1.0 I1.0 F1.1 I1.1 F1.2 I1.2 W1.0 F1.3 I1.3 W1.1 W1.2 W1.3 STEP1",
    ]


def test_a_stage_with_little_room_keeps_those_after_it_from_waiting_for_ever():
    plan = split(tiny_plan(stages=3, microbatches=6))
    program = ZeroBubble((1, 1), limits=(4, 1, 3)).program(plan)
    assert verify(program, plan).peak_spans == (4, 1, 3)
    with pytest.raises(PlanError, match="zero_bubble: stage 1 may hold 1 samples, but has a micro-batch of 2"):
        ZeroBubble(limits=(4, 1, 4)).program(split(Plan.even(3, 6, rows=12)))


@for_each(("f", "i", "w"), [(1, 1, 1), (2, 2, 1), (3, 2, 2)])
@for_each("p", [2, 3, 4, 8])
def test_one_more_for_each_link_leaves_no_bubble_after_the_first_forward(p, f, i, w):
    """Check ZB-H2: the last stage waits (p - 1) f for its first forward, and the step takes the least possible time."""
    plan, costs = uniform(p, 3 * p, f=f, b=i + w, w=w)
    program = ZeroBubble((1,) * (p - 1)).program(split(plan))
    assert verify(program, split(plan)).peak_spans == (2 * p - 1,) * p
    assert makespan(program, split(plan), costs) == least_step(split(plan), costs)


def slow_link():
    """Return eight stages of which the last one is far away.

    F takes 9.4 ms and a whole backward takes 18.8 ms, half of it I and half W.
    """
    plan, costs = uniform(8, 24, f=9_400_000, b=18_800_000)
    far = Link(latency=0.060)
    return plan, replace(costs, links={(6, 7): far, (7, 6): far})


def step(order, plan, costs):
    timeline = simulate(order, adapt_plan(plan, order), costs) if isinstance(order, Ready) else None
    program = timeline.program() if timeline else order.program(adapt_plan(plan, order))
    facts = verify(program, adapt_plan(plan, order))
    return makespan(program, adapt_plan(plan, order), costs) / 1e6, max(facts.peak_spans), facts.peak_spans[0]


def test_split_backwards_go_below_what_whole_ones_can_on_a_slow_link():
    plan, costs = slow_link()
    assert step(OneFOneB(), plan, costs)[0] == pytest.approx(2314, abs=1)
    assert step(PerLink(extra_for(plan, costs)), plan, costs) == pytest.approx((994, 13, 13), abs=1)
    assert least_step(split(plan), costs) / 1e6 == pytest.approx(803, abs=1)
    for held, extra, most in ((13, 5, 860), (16, 7, 803), (24, 7, 803)):
        for order, least in (
            (ZeroBubble((0,) * 6 + (extra,), limits=(held,) * 8), most),
            (Ready(limits=(held,) * 8, split=True), {13: 900, 16: 870, 24: 810}[held]),
        ):
            took, everywhere, first = step(order, plan, costs)
            assert took <= least, order
            assert everywhere == first == held, order


def test_extra_counts_what_is_under_way_while_weights_wait():
    """Check the number of extra micro-batches that hide a round trip of 2 x 60 ms.

    With split backwards, F and I take 9.4 ms each, so 6.4 micro-batches are in flight. With whole backwards, the number
    is 4.3.
    """
    plan, costs = slow_link()
    assert extra_for(plan, costs) == (0,) * 6 + (5,)
    assert extra_for(split(plan), costs) == (0,) * 6 + (7,)
