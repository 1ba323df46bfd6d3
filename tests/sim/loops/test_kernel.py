"""Compare the kernel, in Python and compiled, with two independent simulators."""

import random
from dataclasses import replace

import numpy as np
import pytest

from lightning_pipes.ir import Cut, DeadlockError, F, Kind, Plan, PlanError, RulePolicy, Span, verify
from lightning_pipes.sim import cost_representatives, makespan, makespans, simulate
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.strategies.interleaved import Interleaved
from lightning_pipes.strategies.kfkb import KFKB
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.testing.conformance import ScheduleConformance
from lightning_pipes.testing.generators import random_costs, random_plan, tiny_plan, uniform
from tests.cases import for_each
from tests.sim.by_events import ByEvents, StuckError
from tests.sim.links import sending, shaped
from tests.sim.longest_path import starts
from tests.sim.policies import Asked, ByRule

POLICIES = [ByRule(), ByRule((9,)), ByRule(alternate=False), ByRule((9,), weights_last=True)]


class TestByRule(ScheduleConformance):
    """Runs the suite of schedules with the order that the kernel chooses."""

    schedules = [ByRule(), ByRule((2,)), ByRule(alternate=False)]


def random_window(seed):
    """Return a plan with every feature of a window, and its costs."""
    rng = random.Random(seed)
    plan = random_plan(seed, unequal=seed % 2 == 0, split_backward=seed % 3 == 0)
    if seed % 4 == 1:
        plan = replace(plan, jobs=plan.jobs * 2)
    if seed % 5 == 2 and plan.n_stages > 1:  # several stages per rank
        plan = replace(plan, ranks=tuple(s % (1 + plan.n_stages // 2) for s in range(plan.n_stages)))
    versions = tuple(rng.randint(1, 3) for _ in range(plan.n_stages))
    rows = plan.jobs[0].rows
    limits = tuple(rng.randint(rows, 2 * rows) for _ in range(plan.n_stages)) if seed % 3 == 1 else ()
    plan = replace(plan, batches=1 + seed % 3, versions=versions, limits=limits)
    first, last = (F(0, plan.spans(Kind.F, 0)[n]) for n in (0, -1))
    if seed % 4 == 2 and first != last and not limits:  # the first micro-batch comes last
        plan = replace(plan, after={first: (last,)})
    costs = replace(random_costs(plan, seed), overhead=seed % 2 * 1e-9, activation_bytes=(3,) * plan.n_stages)
    return plan, costs


class TestFixedOrder:
    @for_each("blocking", [False, True])
    @for_each("seed", range(30))
    def test_longest_path_over_shaped_links(self, seed, blocking, kernel):
        plan = random_plan(seed, unequal=seed % 2 == 0)
        costs = shaped(replace(random_costs(plan, seed), overhead=seed % 3 * 1e-9), plan, seed)
        program = (GPipe() if seed % 2 == 0 else KFKB(1 + seed % 3)).program(plan)
        timeline = simulate(program, plan, sending(costs, blocking))
        assert {e.instruction: e.start for e in timeline.events} == starts(program, plan, costs, blocking)
        assert makespan(program, plan, sending(costs, blocking)) == timeline.makespan

    @for_each("seed", range(8))
    def test_several_stages_a_rank(self, seed, kernel):
        plan = tiny_plan(6, 4, ranks=(0, 1, 0, 1, 0, 1) if seed % 2 else (0, 1, 2, 0, 1, 2))
        costs = shaped(random_costs(plan, seed), plan, seed)
        program = Interleaved(3 if seed % 2 else 2).program(plan)
        timeline = simulate(program, plan, costs)
        assert {e.instruction: e.start for e in timeline.events} == starts(program, plan, costs)

    def test_large_times(self, kernel):
        """Check that a step of one week is exact to the nanosecond."""
        f = 10**12 + 1
        plan, costs = uniform(3, 200, f=f, b=2 * f)
        assert makespan(OneFOneB().program(plan), plan, costs) == (200 + 3 - 1) * 3 * f


class TestChosenOrder:
    @for_each("policy", POLICIES)
    @for_each("seed", range(40))
    def test_by_rule_asked_and_by_events(self, seed, policy, kernel):
        plan, costs = random_window(seed)
        costs = shaped(costs, plan, seed, crowded=seed % 2 == 0) if seed % 4 else costs
        blocking = seed % 3 == 0
        memory = 3 * plan.jobs[0].rows * (1 + seed % 2) if seed % 5 == 0 else None
        by_events = ByEvents(policy, plan, costs, plan.batches, memory, blocking)
        try:
            events = by_events.run()
        except StuckError:
            with pytest.raises(DeadlockError, match=r"no operation is in flight: .*waits at"):
                simulate(policy, plan, sending(costs, blocking), memory_limit=memory)
            return
        for order in (policy, Asked(policy)):
            timeline = simulate(order, plan, sending(costs, blocking), memory_limit=memory)
            assert sorted(timeline.events) == sorted(events)
            assert timeline.peak_bytes == tuple(by_events.peak)
        if memory is None:
            assert makespan(policy, plan, sending(costs, blocking)) == timeline.makespan

    @for_each("policy", POLICIES)
    @for_each("seed", range(40))
    def test_chosen_order_takes_the_same_time_as_a_program(self, seed, policy, kernel):
        plan, costs = random_window(seed)
        costs = shaped(costs, plan, seed, crowded=seed % 2 == 0) if seed % 4 else costs
        try:
            timeline = simulate(policy, plan, sending(costs, seed % 3 == 0))
        except DeadlockError:
            assert policy.limits
            return
        program = timeline.program()
        verify(program, plan)
        replayed = simulate(program, plan, sending(costs, seed % 3 == 0))
        assert sorted(replayed.events) == sorted(timeline.events)
        assert replayed.program() == program

    @pytest.mark.parametrize(
        ("forward", "backward", "link", "limits", "alternating", "backward_first"),
        [
            ((21311, 21890, 15663, 19242), (46753, 45922, 43268, 39938), 40009, (6, 8, 5, 8), 2366276, 2608377),
            ((18898, 24709, 23916, 17136), (42122, 49789, 45533, 49033), 5003, (8, 4, 7, 6), 1956880, 2008032),
            ((18867, 19969, 16690, 21489), (45691, 35078, 32952, 32179), 5003, (7, 8, 6, 4), 1640767, 1793878),
        ],
    )
    def test_equals_another_model(self, forward, backward, link, limits, alternating, backward_first, kernel):
        """Compare with a prototype that counts micro-batches instead of using instructions.

        No two events happen at the same instant.
        """
        plan, costs = uniform(4, 24, f=1, b=1, link=link)
        given = {
            (kind, s): ((1, t * 1e-9),)
            for kind, ts in ((Kind.F, forward), (Kind.B, backward))
            for s, t in enumerate(ts)
        }
        costs = replace(costs, seconds={**costs.seconds, **given})
        assert makespan(ByRule(limits), plan, costs) == alternating
        assert makespan(ByRule(limits, alternate=False), plan, costs) == backward_first

    def test_all_at_one_instant(self, kernel):
        """Check that computations without duration still run in a valid order."""
        plan, costs = uniform(2, 3, f=0, b=0)
        for policy in (ByRule(), Asked(ByRule())):
            program = simulate(policy, plan, costs).program()
            verify(program, plan)
            assert program.head[0][0] == F(0, Span(0, 1))

    def test_a_limit_of_one_stage_at_a_time(self, kernel):
        """Check that p stages alternate if only one micro-batch is in flight on every stage."""
        plan, costs = uniform(3, 4, f=1, b=2)
        timeline = simulate(ByRule((1,)), plan, costs)
        assert verify(timeline.program(), plan).peak_spans == (1, 1, 1)
        assert timeline.makespan == 4 * 3 * 3

    def test_no_forward_overtakes_one_that_does_not_fit(self, kernel):
        """Check that a smaller forward does not overtake a forward that does not fit.

        The spans have 2, 3 and 1 samples, and the limit is 4. The third span would fit next to the first one, but waits
        for the second.
        """
        plan = Plan((0, 1), (Cut(6, ((Span(0, 2), Span(2, 5), Span(5, 6)),) * 2),), limits=(4, 6))
        for policy in (ByRule(), Asked(ByRule())):
            timeline = simulate(policy, plan, uniform(2, 1, f=1, b=2)[1])
            assert timeline.program().to_lines()[0] == "F0.0 B0.0 F0.1 F0.2 B0.1 B0.2 STEP0"

    def test_stuck_for_a_limit(self, kernel):
        plan, costs = uniform(2, 2, f=1, b=2)
        plan = replace(plan, limits=(2, 0))
        with pytest.raises(DeadlockError, match=r"rank 1 waits at F1\[0:1\]: stage 1 has room for 0 more samples"):
            simulate(ByRule(), plan, costs)

    def test_it_is_a_rule_policy_and_what_is_asked_is_not(self):
        assert isinstance(ByRule(), RulePolicy)
        assert not isinstance(Asked(ByRule()), RulePolicy)


class TestManyCosts:
    @for_each("crowded", [False, True])
    @for_each("seed", range(6))
    def test_each_as_if_alone(self, seed, crowded, kernel):
        plan = random_plan(seed, unequal=seed % 2 == 0)
        base = shaped(replace(random_costs(plan, seed), overhead=1e-9), plan, seed, crowded=crowded)
        program = GPipe().program(plan)
        many = [replace(base, seconds=random_costs(plan, n).seconds) for n in range(7)]

        def time(i, costs):
            return costs.transfer_ns(i, plan)[0] if i.kind in (Kind.SF, Kind.SB) else costs.duration_ns(i, plan)

        times = np.array([[time(i, costs) for i in cost_representatives(program, plan)] for costs in many])
        for blocking in (False, True):
            alone = [makespan(program, plan, sending(costs, blocking)) for costs in many]
            assert makespans(program, plan, sending(base, blocking), times).tolist() == alone

    def test_other_shapes_are_refused(self):
        plan, costs = uniform(2, 2, f=1, b=2)
        program = GPipe().program(plan)
        for times in (np.zeros((3, 1), np.int64), np.zeros(8, np.int64), np.zeros((3, 8))):
            with pytest.raises(PlanError, match="8 columns"):
                makespans(program, plan, costs, times)
