from dataclasses import replace

import pytest

from lightning_pipes.ir import B, F, I, Instruction, Plan, PlanError, RankView, RulePolicy, W, adapt_plan, verify
from lightning_pipes.sim import simulate
from lightning_pipes.strategies.kfkb import KFKB
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.strategies.ready import Ready, limits_for
from lightning_pipes.testing.conformance import ScheduleConformance
from lightning_pipes.testing.generators import random_costs, tiny_plan, uniform
from tests.cases import for_each


class TestReady(ScheduleConformance):
    schedules = [
        Ready(),
        Ready(slack=0),
        Ready(slack=9),
        Ready(alternate=False),
        Ready(split=True),
        Ready(0, alternate=False, split=True),
    ]
    refused = [
        lambda: Ready(slack=-1),
        lambda: Ready(limits=(1, 1)).rule(tiny_plan(3, 4)),
        lambda: Ready(limits=(2, 1)).rule(Plan.even(2, 2, rows=4)),
        lambda: Ready(split=True).rule(tiny_plan(3, 4)),
    ]

    def most_held(self, schedule, plan, stage):
        return min(schedule.rule(plan).limits[stage], len(plan.jobs[0].forward[0]))


def test_small_order():
    """Check that forwards and backwards alternate if both are ready, and that rank 0 holds at most two."""
    plan, costs = uniform(stages=2, microbatches=3, f=1, b=1)
    assert simulate(Ready(slack=0), plan, costs).program().to_lines() == [
        "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2 STEP0",
        "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 STEP1",
    ]


def test_says_itself_in_numbers():
    plan = Plan.even(4, 8, rows=16)
    assert isinstance(Ready(), RulePolicy)
    assert Ready(slack=0).rule(plan).limits == (8, 6, 4, 2)  # the limits of 1F1B, for micro-batches of two samples
    assert Ready(slack=3).rule(plan).limits == (14, 10, 6, 2)
    assert Ready(slack=1).rule(plan).limits == (10, 8, 6, 2)
    assert Ready(limits=[9, 9, 9, 2]).rule(plan).limits == (9, 9, 9, 2)
    assert Ready(slack=2).rule(Plan.even(1, 4)).limits == (1,)


@pytest.mark.parametrize(("last", "alternate", "picked"), [(F, True, B), (B, True, F), (B, False, B), (None, True, F)])
def test_alternates(last, alternate, picked):
    plan = tiny_plan(2, 4)
    spans = plan.jobs[0].forward[0]
    ready: list[Instruction] = [B(0, spans[0]), F(0, spans[1]), F(0, spans[2])]
    view = RankView(0, last and last(0, spans[0]), {0: 1})
    assert Ready(alternate=alternate).pick(ready, view, plan) == picked(0, spans[0 if picked is B else 1])


@pytest.mark.parametrize(
    ("last", "alternate", "picked"), [(F, True, I), (I, True, F), (W, True, F), (None, False, I), (F, False, I)]
)
def test_weight_gradients_come_last(last, alternate, picked):
    plan = adapt_plan(tiny_plan(2, 4), Ready(split=True))
    spans = plan.jobs[0].forward[0]
    ready: list[Instruction] = [W(0, spans[0]), I(0, spans[1]), F(0, spans[2])]
    view = RankView(0, last and last(0, spans[0]), {0: 2})
    policy = Ready(alternate=alternate, split=True)
    assert policy.pick(ready, view, plan) == picked(0, spans[1 if picked is I else 2])
    assert policy.pick([W(0, spans[0]), F(0, spans[3])], replace(view, in_flight={0: 4}), plan) == W(0, spans[0])


def test_later_stages_hold_as_much_where_backward_is_split():
    plan = adapt_plan(Plan.even(4, 8, rows=16), Ready(split=True))
    assert Ready(slack=3, split=True).rule(plan).limits == (14,) * 4
    assert Ready(limits=(9, 9, 9, 2), split=True).rule(plan).limits == (9, 9, 9, 2)


def test_never_holds_more_than_its_limits():
    for seed in range(20):
        schedule = Ready(slack=seed % 4, split=seed % 3 == 0)
        plan = adapt_plan(Plan.even(4, 9, rows=13), schedule)
        program = simulate(schedule, plan, random_costs(plan, seed)).program()
        held = verify(program, plan).peak_rows
        assert all(h <= most for h, most in zip(held, schedule.rule(plan).limits, strict=True))


@for_each("m", [1, 4, 9])
@for_each("p", [1, 2, 4, 8])
def test_step_time_on_free_links(p, m):
    """Check that a step takes (m + p - 1)(f + b), as with 1F1B, and without more memory."""
    plan, costs = uniform(p, m, f=1, b=2)
    assert simulate(Ready(slack=0), plan, costs).makespan == (m + p - 1) * 3


@pytest.mark.parametrize(
    ("order", "seconds", "error"),
    [
        (OneFOneB(), 2.337, 0.04),
        (Ready(limits=(6,) * 4), 1.842, 0.02),
        (Ready(limits=(8,) * 4), 1.735, 0.02),
        (KFKB(k=2), 1.736, 0.02),
    ],
    ids=["1f1b", "six held", "eight held", "2f2b"],
)
def test_steps_that_were_measured(order, seconds, error):
    """Compare simulated steps with measured ones.

    The measured runs had four stages, 24 micro-batches, F of 20 ms, B of 40 ms, and real links shaped to 20 ms per
    message.
    """
    plan, costs = uniform(4, 24, f=20, b=40, link=20)
    found = simulate(order if isinstance(order, Ready) else order.program(plan), plan, costs).makespan
    assert found == pytest.approx(seconds * 1e3, rel=error)


def test_slack_hides_links():
    plan, costs = uniform(4, 24, f=20, b=40, link=40)
    times = [simulate(Ready(slack=n), plan, costs).makespan for n in (0, 2, 4, 8)]
    assert times == sorted(times, reverse=True)
    assert times[-1] < 0.8 * times[0]


class TestLimitsForMemory:
    def costs(self, **more):
        plan, costs = uniform(4, 12, f=20, b=40, link=60, activation_bytes=100)
        return plan, replace(costs, weight_bytes=(1000,) * 4, **more)

    def test_all_that_fits(self):
        plan, costs = self.costs()
        assert limits_for(plan, costs, 1000 + 399) == (3, 3, 3, 3)
        assert limits_for(plan, costs, [1100, 1200, 1300, 10**9]) == (1, 2, 3, 12)
        assert limits_for(plan, costs, None) == (12,) * 4

    @pytest.mark.parametrize("working", [0, 30])
    def test_the_simulator_never_holds_more(self, working):
        plan, costs = self.costs(working_bytes=(working,) * 4)
        for limit in range(1200, 2500, 70):
            policy = Ready(limits=limits_for(plan, costs, limit))
            assert max(simulate(policy, plan, costs).peak_bytes) <= limit

    def test_whole_micro_batches(self):
        plan = Plan.even(4, 6, rows=18)
        _, costs = self.costs()
        assert limits_for(plan, costs, 1000 + 1000) == (9, 9, 9, 9)

    def test_recomputing_stages_leave_room_for_one_full_set(self):
        plan, costs = self.costs(forward_bytes=(10.0,) * 3)
        plan = replace(plan, recompute=(True, True, True, False))
        found = limits_for(plan, costs, 1000 + 150)
        assert found == (12, 5, 5, 1)
        assert max(simulate(Ready(limits=found), plan, costs).peak_bytes) <= 1150

    def test_error_names_missing_bytes(self):
        plan, costs = self.costs()
        with pytest.raises(
            PlanError, match=r"stage 2 has 1.06 KiB and needs 1.07 KiB for one micro-batch of 1 samples"
        ):
            limits_for(plan, costs, [2000, 2000, 1090, 2000])

    def test_more_memory_is_never_slower(self):
        plan, costs = self.costs()
        times = [
            simulate(Ready(limits=limits_for(plan, costs, b)), plan, costs).makespan for b in range(1400, 2300, 100)
        ]
        assert times == sorted(times, reverse=True)
