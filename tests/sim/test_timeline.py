import random

import pytest

from lightning_pipes.ir import F, Instruction, Kind
from lightning_pipes.sim import Event, Timeline, simulate
from lightning_pipes.strategies.kfkb import KFKB
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.testing.generators import tiny_plan, uniform
from tests.sim.timelines import ONE, PLAN, TIMELINE


def test_the_first_event_starts_at_zero():
    events = [Event(0, F(0, ONE), 100, 110), Event(1, F(1, ONE), 90, 95)]
    timeline = Timeline.from_events(events, PLAN)
    assert [(e.rank, e.start, e.end) for e in timeline.events] == [(1, 0, 5), (0, 10, 20)]
    assert timeline.makespan == 20
    assert timeline.busy == (10, 5)
    assert timeline.bubble == (0.5, 0.75)


def test_gathered_from_ranks_with_clocks_of_their_own():
    by_rank = [[e for e in TIMELINE.events if e.rank == rank] for rank in (0, 1)]
    assert Timeline.from_ranks(by_rank, PLAN).events == TIMELINE.events
    late = [by_rank[0], [e._replace(start=e.start - 1000, end=e.end - 1000) for e in by_rank[1]]]
    assert Timeline.from_ranks(late, PLAN, offsets=(0, 1000)).events == TIMELINE.events
    assert Timeline.from_ranks(late, PLAN).events != TIMELINE.events


def test_shuffled_events_give_back_the_program():
    events = list(TIMELINE.events)
    random.Random(0).shuffle(events)
    assert Timeline.from_events(events, PLAN).program() == OneFOneB().program(PLAN)


def test_link_busy_counts_overlapping_messages_once():
    sf = Instruction(Kind.SF, 0, span=ONE)
    events = [Event(0, sf, 0, 10), Event(0, sf, 5, 12), Event(0, sf, 20, 21), Event(1, sf._replace(stage=1), 0, 3)]
    plan = tiny_plan(3, 1)
    assert Timeline.from_events(events, plan).link_busy == {(0, 1): 13, (1, 2): 3}


def test_link_busy_of_a_simulation():
    plan, costs = uniform(2, 3, f=2, b=4, link=3)
    assert simulate(OneFOneB().program(plan), plan, costs).link_busy == {(0, 1): 9, (1, 0): 9}


def test_an_empty_timeline():
    empty = Timeline((), PLAN)
    assert (empty.makespan, empty.bubble, empty.efficiency) == (0, (0.0, 0.0), 0.0)
    assert "rank 1" in empty.gantt(20)


def test_efficiency_is_the_slowest_ranks_share():
    timeline = Timeline.from_events([Event(0, F(0, ONE), 0, 8), Event(1, F(1, ONE), 8, 10)], PLAN)
    assert timeline.efficiency == 0.8


def queue_by_hand(timeline: Timeline, kind: Kind, stage: int) -> list[int]:
    """Return the number of waiting inputs at each launch, counted again for every launch."""
    rank = timeline.plan.ranks[stage]
    sends = (Kind.SF, stage - 1) if kind is Kind.F else (Kind.SB, stage + 1)
    found = []
    own = sorted((e for e in timeline.computations if e.rank == rank), key=lambda e: e.start)
    for n, launch in enumerate(own):
        if (launch.instruction.kind, launch.instruction.stage) == (kind, stage):
            due = own[n - 1].end if n else 0
            arrived = {e.instruction.span for e in timeline.transfers if e.instruction[:2] == sends and e.end <= due}
            used = {e.instruction.span for e in own[:n] if e.instruction[:2] == launch.instruction[:2]}
            found.append(len(arrived - used))
    return found


@pytest.mark.parametrize("k", [1, 2, 6])
@pytest.mark.parametrize("link", [0, 7, 30])
def test_queues_of_arrived_inputs(k: int, link: int) -> None:
    plan, costs = uniform(3, 6, f=10, b=20, link=link)
    timeline = simulate(KFKB(k).program(plan), plan, costs)
    queues = {(q.kind, q.stage): q for q in timeline.input_queues}
    assert sorted(queues) == [(Kind.B, 0), (Kind.B, 1), (Kind.F, 1), (Kind.F, 2)]
    for (kind, stage), queue in queues.items():
        assert list(queue.lengths) == queue_by_hand(timeline, kind, stage)
        assert [n == 0 for n in queue.lengths] == [
            waited > 0 for waited in queue.stalled
        ]  # no stall while an input is available
    for rank in range(3):  # a rank computes or waits for an input
        last = max(e.end for e in timeline.computations if e.rank == rank)
        waited = sum(sum(q.stalled) for q in queues.values() if plan.ranks[q.stage] == rank)
        assert waited == last - timeline.busy[rank]


def test_text_gantt():
    plan, costs = uniform(2, 3, f=2, b=4, step=2)
    assert simulate(OneFOneB().program(plan), plan, costs).gantt(52).splitlines() == [
        "26 ns",
        "rank 0 |0---1---........0=======2---1=======....2=======S###| bubble 23.1%",
        "rank 1 |....0---0=======1---1=======2---2=======S###........| bubble 23.1%",
        "        - forward  = backward  # step  . idle",
    ]
