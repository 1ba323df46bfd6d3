"""Check shaped links on examples by hand: token buckets, posted receives and shared wires."""

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
"""The bandwidth at which a byte takes a nanosecond."""


def forwards(order, link, *, f=1, size=8, microbatches=3):
    """Return (start, end) of the activations that the first of two stages sends."""
    plan = tiny_plan(2, microbatches)
    costs = CostModel.uniform(2, f * 1e-9, 1e-9, message_bytes=size, link=link)
    order = order.program(plan) if hasattr(order, "program") else order
    return [(e.start, e.end) for e in simulate(order, plan, costs).transfers if e.instruction.kind is Kind.SF]


@pytest.fixture(params=[GPipe(), ByRule(), Asked(ByRule())], ids=["fixed", "rule", "asked"])
def order(request):
    """Return an order that runs all forwards of stage 0 first, because its gradients take longer."""
    return request.param


class TestTokenBucket:
    def test_at_full_speed_while_there_are_tokens_at_the_rate_then(self, order, kernel):
        """Check that a link runs at its peak speed while it has tokens, and then at its rate.

        Bytes leave at 2 per nanosecond, and tokens arrive at 1 per nanosecond. The first message leaves 2 of 6 tokens.
        The second message uses them to send 4 bytes in 2 ns, and sends 4 more bytes at the rate. The third message has
        no tokens.
        """
        link = Link(RATE, burst=6, peak=2 * RATE)
        assert forwards(order, link) == [(1, 5), (5, 11), (11, 19)]

    def test_without_a_peak_what_the_bucket_holds_takes_no_time(self, order, kernel):
        assert forwards(order, Link(RATE, burst=6)) == [(1, 3), (3, 11), (11, 19)]
        # 12 tokens are left, then 5, and 1 is added in 1 ns
        assert forwards(order, Link(RATE, burst=20)) == [(1, 1), (2, 2), (3, 5)]

    def test_it_fills_while_the_link_idles_up_to_its_depth(self, order, kernel):
        """Check messages of 12 bytes, one every 10 ns.

        The bucket covers 4 bytes of the first message, and later the tokens that arrived in the meantime.
        """
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
        assert saved == 2 * 40  # in each direction


class TestPostedReceives:
    def test_a_receive_is_posted_again_when_a_message_has_come_and_the_sender_hears_of_it(self, order, kernel):
        """Check messages of one byte with a latency of 10 ns and a single posted receive.

        After 10 ns the message arrives and the receive is posted again, and after 10 more the sender is notified.
        """
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
        """Check that messages of two stages on one host alternate if the hosts share a wire.

        Stages 0 and 2 are on one host, and stages 1 and 3 on the other. Stage 0 sends at 3, 13, 23 and 33. Stage 2
        finishes the first micro-batch at 29, after three computations of 3 ns and two messages of 10 ns.
        """
        plan = Plan.even(4, 4, ranks=(0, 2, 1, 2))
        cluster = Cluster(tuple(Device(host=name) for name in "aab"), between=Link(RATE), shared=shared)
        costs = CostModel.uniform(4, 3e-9, 9e-9, message_bytes=10)
        costs = replace(costs, links={(a, b): cluster.link_between(a, b) for a, b, _ in plan.directed_links})
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
        # the message takes no time on the wire
        own = CostModel.uniform(2, 1e-9, 1e-9, message_bytes=5, link=Link(latency=7e-9))
        shared = replace(own, link=replace(own.link, wire="one"))
        timeline = simulate(program, plan, shared)
        assert set(timeline.events) == set(simulate(program, plan, own).events)
        begins = {e.instruction: e.start for e in timeline.events}
        assert begins[second] == begins[F(0, c)] == 1 + 7 + 2 + 7
        with pytest.raises(PlanError, match="contains transfers"):
            simulate(program, plan, sending(shared, True))
