from dataclasses import replace
from itertools import product

import pytest

from lightning_pipes.ir import STEP, F, I, Kind, Plan, Program, W, prepared, verify
from lightning_pipes.sim import makespan, simulate
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.strategies.zero_bubble import ZeroBubble
from lightning_pipes.testing.conformance import ScheduleConformance
from lightning_pipes.testing.generators import tiny_plan, uniform


class TestZeroBubble(ScheduleConformance):
    schedules = [ZeroBubble()]
    refused = [
        lambda: ZeroBubble().program(tiny_plan(4, 4)),
        lambda: ZeroBubble().program(prepared(tiny_plan(4, 4, ranks=(0, 1, 0, 1)), ZeroBubble())),
    ]

    def most_held(self, schedule, plan, stage):
        return min(plan.n_stages, len(plan.jobs[0].forward[0]))


def split(plan):
    return replace(plan, split_backward=True)


def test_small_order():
    program = ZeroBubble().program(split(tiny_plan(stages=2, microbatches=3)))
    assert program.lines() == [
        "F0.0 F0.1 I0.0 W0.0 F0.2 I0.1 W0.1 I0.2 W0.2 STEP0",
        "F1.0 I1.0 F1.1 I1.1 W1.0 F1.2 I1.2 W1.1 W1.2 STEP1",
    ]


def bubble(p, m, f, i, w):
    plan, costs = uniform(p, m, f=f, b=i + w, w=w)
    plan = split(plan)
    timeline = simulate(ZeroBubble().program(plan), plan, costs)
    assert timeline.busy == (m * (f + i + w),) * p
    return timeline.makespan - timeline.busy[0]


@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (2, 2, 1), (3, 2, 2), (10, 14, 9), (5, 4, 0)])
@pytest.mark.parametrize("extra", [0, 1, 7])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_bubble_of_the_paper(p, extra, f, i, w):
    """(p - 1)(f + b_I - w), table 2."""
    assert bubble(p, p + extra, f, i, w) == (p - 1) * (f + i - w)


@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 2), (2, 2, 3), (1, 3, 2), (3, 1, 2), (1, 4, 9), (0, 1, 1)])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_bubble_where_weights_take_longer(p, f, i, w):
    assert bubble(p, 2 * p, f, i, w) == (p - 1) * max(f + i - w, f, i)


@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_bubble_of_few_microbatches(m):
    """W of m - 1 micro-batches fill what is idle, and there are no more of them."""
    assert bubble(4, m, 2, 2, 1) == 3 * (2 + 2) - (m - 1) * 1


def all_orders(p, m):
    """Every program of p stages with all kinds in order of micro-batches and at most p held between F and W."""

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
    """Whether no rank waits for ever: with two stages, the first needs no gradient before its activation was sent."""
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
    assert prepared(plan, ZeroBubble()) == split(plan)
    assert prepared(split(plan), OneFOneB()) == plan
