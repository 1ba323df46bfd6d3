"""Check v(k): its memory, its bubble compared with the values of the paper's authors, and its bad inputs."""

from dataclasses import replace

import pytest

from lightning_pipes.ir import COMPUTE_KINDS, Cut, Kind, Plan, PlanError, adapt_plan, even_spans, verify
from lightning_pipes.sim import simulate
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.strategies.v import V, order
from lightning_pipes.testing.conformance import ScheduleConformance
from lightning_pipes.testing.generators import tiny_plan, uniform


class TestV(ScheduleConformance):
    schedules = [V(), V(k=8, times=(10, 12, 8, 1)), V(split=False)]
    refused = [
        lambda: V(k=0),
        lambda: V(k=2.0),
        lambda: V(times=(1, 1, 0, 1)),
        lambda: V(times=(1, 1, 1, -1)),
        lambda: V(times=(1, 1, 1)),
        lambda: V().program(tiny_plan(4, 4, ranks=(0, 1, 1, 0))),
        lambda: V().program(split(tiny_plan(4, 4))),
        lambda: V(k=3).program(split(tiny_plan(8, 4, ranks=V().place_stages(4)))),
    ]

    def most_held(self, schedule, plan, stage):
        return min(schedule.held(plan.n_ranks), len(plan.jobs[0].forward[0]))


def split(plan):
    return replace(plan, split_backward=True)


def held_by_rank(program):
    """Return the largest number of half-stages that each rank holds between F and W, or between F and B."""
    found = []
    for row in program.head:
        now = most = 0
        for i in row:
            now += {"F": 1, "W": -1, "B": -1}.get(i.kind, 0)
            most = max(most, now)
        found.append(most)
    return found


def longest_span(schedule, p, m, f=1, i=1, w=1, message=0):
    """Return the longest time of a rank from its first to its last computation, and the half-stages that it holds."""
    plan, costs = uniform(2 * p, m, f, i + w, w=w, latency=message, ranks=schedule.place_stages(p))
    plan = adapt_plan(plan, schedule)
    program = schedule.program(plan)
    timeline = simulate(program, plan, costs)
    spans = []
    for rank in range(p):
        own = [e for e in timeline.events if e.rank == rank and e.instruction.kind in COMPUTE_KINDS]
        spans.append(max(e.end for e in own) - min(e.start for e in own if e.instruction.kind is not Kind.STEP))
    return max(spans), max(held_by_rank(program))


OF_THE_AUTHORS = {
    4: {4: 11, 5: 8, 6: 5, 7: 3, 8: 0},
    6: {6: 17, 7: 14, 8: 11, 9: 8, 10: 5, 11: 3, 12: 0},
    8: {8: 23, 9: 20, 10: 17, 11: 14, 12: 11, 13: 8, 14: 5, 15: 3, 16: 0},
}
"""The time that the longest rank waits, for each number of ranks and each k, in an order of the paper's authors."""


@pytest.mark.parametrize(("p", "k"), [(p, k) for p, known in OF_THE_AUTHORS.items() for k in known])
def test_waits_no_longer_than_the_orders_of_the_authors(p, k):
    m = 2 * p
    span, held = longest_span(V(k), p, m)
    assert held <= k
    assert span - 6 * m <= OF_THE_AUTHORS[p][k]


GREEDY_SPANS = {(4, 4): 728, (4, 6): 576, (6, 6): 1112, (6, 8): 906, (8, 8): 1536, (8, 10): 1234}
"""The longest span of a rank in greedy orders for F, I, W and messages of 10, 12, 8 and 1, for p and k."""


@pytest.mark.parametrize(("p", "k"), GREEDY_SPANS)
def test_unequal_durations(p, k):
    span, held = longest_span(V(k, times=(10, 12, 8, 1)), p, 2 * p, 10, 12, 8, 1)
    assert held <= k
    assert span <= GREEDY_SPANS[p, k]


@pytest.mark.parametrize(
    ("p", "m", "k"), [(4, 4, 8), (4, 7, 4), (4, 8, 6), (6, 6, 8), (4, 10, 8), (4, 12, 5), (3, 12, 5)]
)
@pytest.mark.parametrize("times", [(1, 1, 1, 0), (7, 9, 8, 3), (5, 12, 7, 0)])
def test_no_pattern_has_a_smaller_sum_of_makespan_and_wait(p, m, k, times):
    """Compare with all patterns, executed with all micro-batches, also with fewer micro-batches than 2p."""
    found = order.find_order(p, m, k, order.Durations(*times), True).length
    others = []
    for pattern in order.find_patterns(p):
        for patience in order.PATIENCES if pattern.held <= k else ():
            rows = order.make_rows(pattern, k, m)
            others.append(order.Execution(rows, m, k, order.Durations(*times), True, patience).run(order.NEVER))
    assert found.total == found.idle + found.makespan
    assert found == min(each for each in others if each is not None)


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("m", [1, 2, 3, 9, 40])
def test_any_number_of_microbatches_within_memory(p, m):
    for schedule in (V(V.least_held(p)), V(2 * p), V(p + 2, split=False)):
        plan = adapt_plan(tiny_plan(2 * p, m, ranks=schedule.place_stages(p)), schedule)
        program = schedule.program(plan)
        verify(program, plan)
        assert max(held_by_rank(program)) <= schedule.k


def test_small_order():
    schedule = V()
    plan = split(tiny_plan(4, 2, ranks=schedule.place_stages(2)))
    assert schedule.program(plan).to_lines() == [
        "F0.0 F0.1 F3.0 I3.0 F3.1 I3.1 I0.0 W3.0 I0.1 W3.1 W0.0 W0.1 STEP0 STEP3",
        "F1.0 F2.0 F1.1 F2.1 I2.0 I1.0 I2.1 I1.1 W2.0 W1.0 W2.1 W1.1 STEP1 STEP2",
    ]


def test_needs_a_third_of_the_memory_of_1f1b():
    for p in (4, 8, 16, 32):
        assert V.least_held(p) <= (2 * p + 5) / 3 + 2
    plan = tiny_plan(4, 16)
    whole = verify(OneFOneB().program(plan), plan).peak_spans
    assert 2 * max(whole) == 8
    assert longest_span(V(), 4, 16)[1] == 6


def test_refuses_a_small_k_by_name():
    plan = split(tiny_plan(16, 4, ranks=V().place_stages(8)))
    with pytest.raises(
        PlanError, match=r"v: k=2 is too small, because on 8 ranks, a rank holds at least 6 half-stages"
    ):
        V(2).program(plan)


def test_refuses_spans_that_differ_between_its_stages():
    four, two = even_spans(4, 4), even_spans(4, 2)
    with pytest.raises(PlanError, match="same spans"):
        V().program(split(Plan((0, 1, 1, 0), (Cut(4, (four, four, four, two)),))))


@pytest.mark.parametrize("p", [4, 6, 8])
def test_whole_backwards_have_less_memory_and_a_shorter_bubble_than_1f1b(p):
    span, held = longest_span(V(split=False), p, 2 * p)
    assert held < 2 * p
    assert span - 6 * 2 * p < 2 * 3 * (p - 1)  # 1F1B idles for (p - 1)(f + b), and a rank has two half-stages
