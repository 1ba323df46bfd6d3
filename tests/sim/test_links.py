"""Shaped links, small enough to follow by hand: token buckets, posted receives, shared wires."""

from dataclasses import replace

import pytest

from lightning_pipes.cost import Cluster, CostModel, Device, Link
from lightning_pipes.ir import F, Instruction, Kind, Plan, PlanError, Program, lower
from lightning_pipes.sim import makespan, simulate
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.testing.generators import random_costs, random_plan, tiny_plan
from tests.cases import for_each
from tests.sim.by_events import ByEvents
from tests.sim.links import sending, shaped
from tests.sim.policies import Asked, ByRule, Scripted

RATE = 1e9
"""A byte is a nanosecond."""


def forwards(order, link, *, f=1, size=8, microbatches=3):
    """(start, end) of the activations from the first of two stages."""
    plan = tiny_plan(2, microbatches)
    costs = CostModel.uniform(2, f * 1e-9, 1e-9, message_bytes=size, link=link)
    order = order.program(plan) if hasattr(order, "program") else order
    return [(e.start, e.end) for e in simulate(order, plan, costs).transfers if e.instruction.kind is Kind.SF]


@pytest.fixture(params=[GPipe(), ByRule(), Asked(ByRule())], ids=["fixed", "rule", "asked"])
def order(request):
    """All forwards of stage 0 come first under each of them, as its gradients take longer."""
    return request.param


class TestTokenBucket:
    def test_at_full_speed_while_there_are_tokens_at_the_rate_then(self, order, kernel):
        """Bytes leave at 2 a nanosecond and tokens come at 1. The first message leaves 2 of 6 tokens; with these the
        second moves 4 bytes in 2 ns, and 4 more at the rate; the third has none."""
        link = Link(RATE, burst=6, peak=2 * RATE)
        assert forwards(order, link) == [(1, 5), (5, 11), (11, 19)]

    def test_without_a_peak_what_the_bucket_holds_takes_no_time(self, order, kernel):
        assert forwards(order, Link(RATE, burst=6)) == [(1, 3), (3, 11), (11, 19)]
        assert forwards(order, Link(RATE, burst=20)) == [(1, 1), (2, 2), (3, 5)]  # 12 tokens left, 5 and one in 1 ns

    def test_it_fills_while_the_link_idles_up_to_its_depth(self, order, kernel):
        """A message each 10 ns, of 12 bytes: the bucket makes up for 2, then for what came in the meantime."""
        link = Link(RATE, burst=4)
        assert forwards(order, link, f=10, size=12) == [(10, 18), (20, 30), (30, 42)]
        assert forwards(order, link, f=30, size=12) == [(30, 38), (60, 68), (90, 98)]

    def test_a_deep_enough_bucket_is_a_faster_link(self, order, kernel):
        shaped = Link(RATE, burst=1000, peak=4 * RATE, latency=3e-9)
        assert forwards(order, shaped) == forwards(order, Link(4 * RATE, latency=3e-9))

    def test_a_long_stream_saves_the_bucket_once(self):
        plan = tiny_plan(2, 100)
        costs = CostModel.uniform(2, 1e-9, 1e-9, message_bytes=50, link=Link(RATE))
        program = GPipe().program(plan)
        saved = makespan(program, plan, costs) - makespan(program, plan, replace(costs, link=Link(RATE, burst=40)))
        assert saved == 2 * 40  # each way


class TestPostedReceives:
    def test_a_receive_is_posted_again_when_a_message_has_come_and_the_sender_hears_of_it(self, order, kernel):
        """A byte, 10 ns on its way; one receive: 10 ns until it is posted again, 10 until the sender knows."""
        link = Link(RATE, latency=10e-9, max_in_flight=1)
        assert forwards(order, link, size=1) == [(1, 12), (22, 33), (43, 54)]

    def test_a_second_one_hides_half_of_it(self, order, kernel):
        link = Link(RATE, latency=10e-9, max_in_flight=2)
        assert forwards(order, link, size=1, microbatches=4) == [(1, 12), (2, 13), (22, 33), (23, 34)]

    @pytest.mark.parametrize("in_flight", [1, 2, 4])
    def test_without_latency_one_is_enough(self, in_flight, order):
        assert forwards(order, Link(RATE, max_in_flight=in_flight)) == forwards(order, Link(RATE))

    def test_enough_of_them_never_wait(self, order):
        link = Link(RATE, latency=10e-9)
        assert forwards(order, replace(link, max_in_flight=4), size=8) == forwards(order, link, size=8)


class TestSharedWires:
    @pytest.mark.parametrize(("shared", "begins"), [(False, 29), (True, 43)])
    def test_messages_of_two_ranks_take_turns(self, shared, begins, order, kernel):
        """Stages 0 and 2 on a host, 1 and 3 on another. Stage 0 sends at 3, 13, 23 and 33; stage 2 has computed the
        first micro-batch at 29, three of 3 ns and two messages of 10 after the start."""
        plan = Plan.even(4, 4, ranks=(0, 2, 1, 2))
        cluster = Cluster(tuple(Device(host=name) for name in "aab"), between=Link(RATE), shared=shared)
        costs = CostModel.uniform(4, 3e-9, 9e-9, message_bytes=10).on_cluster(cluster, plan.ranks)
        timeline = simulate(order.program(plan) if hasattr(order, "program") else order, plan, costs)
        sent = {str(e.instruction): e.start for e in timeline.transfers}
        assert [sent[f"SF0[{n}:{n + 1}]"] for n in range(4)] == [3, 13, 23, 33]
        assert sent["SF2[0:1]"] == begins

    @for_each("blocking", [False, True])
    @for_each("seed", range(20))
    def test_a_program_as_a_policy_asked_by_events(self, seed, blocking, kernel):
        plan = random_plan(seed, unequal=False)
        costs = shaped(random_costs(plan, seed), plan, seed, crowded=True)
        program = OneFOneB().program(plan)
        events = ByEvents(Scripted(program.head), plan, costs, blocking_sends=blocking).run()
        assert sorted(simulate(program, plan, sending(costs, blocking)).events) == sorted(events)

    def test_transfers_placed_by_hand_are_timed_unless_sends_block(self, kernel):
        plan = tiny_plan(2, 3)
        a, b, c = plan.spans(Kind.F, 0)
        first = list(lower(GPipe().program(plan), plan).head[0])
        last = list(lower(OneFOneB().program(plan), plan).head[1])
        gradient, second = Instruction(Kind.RB, 0, span=a), Instruction(Kind.SF, 0, span=b)
        first.remove(gradient)
        first.insert(first.index(second), gradient)  # the second message waits for the first gradient
        program = Program((tuple(first), tuple(last)))
        own = CostModel.uniform(2, 1e-9, 1e-9, message_bytes=5, link=Link(latency=7e-9))  # no time on the wire
        shared = replace(own, link=replace(own.link, wire="one"))
        timeline = simulate(program, plan, shared)
        assert set(timeline.events) == set(simulate(program, plan, own).events)
        begins = {e.instruction: e.start for e in timeline.events}
        assert begins[second] == begins[F(0, c)] == 1 + 7 + 2 + 7
        with pytest.raises(PlanError, match="by hand"):
            simulate(program, plan, sending(shared, True))
