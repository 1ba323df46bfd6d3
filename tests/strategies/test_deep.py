import pytest

from lightning_pipes.ir import verify
from lightning_pipes.sim import simulate
from lightning_pipes.strategies.deep import Deep, taper_slack
from lightning_pipes.strategies.kfkb import KFKB
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.testing.conformance import ScheduleConformance
from lightning_pipes.testing.generators import tiny_plan, uniform
from tests.cases import for_each


class TestDeep(ScheduleConformance):
    schedules = [Deep(slack=0), Deep(), Deep(slack=3), Deep(slack=64)]
    refused = [
        lambda: Deep(slack=-1),
        lambda: Deep(slack=1.5),
        lambda: Deep().program(tiny_plan(4, 4, ranks=(0, 1, 0, 1))),
    ]

    def most_held(self, schedule, plan, stage):
        return min(taper_slack(plan.n_stages, schedule.slack)[stage], len(plan.jobs[0].forward[0]))


def test_small_order():
    assert Deep(slack=1).program(tiny_plan(stages=2, microbatches=4)).to_lines() == [
        "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3 STEP0",
        "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 F1.3 B1.3 STEP1",
    ]


@for_each("m", [1, 3, 9])
@for_each("p", [1, 2, 4])
def test_without_slack_it_is_1f1b(p, m):
    plan = tiny_plan(p, m)
    assert Deep(slack=0).program(plan) == OneFOneB().program(plan)


@pytest.mark.parametrize(
    ("slack", "held"), [(0, (4, 3, 2, 1)), (1, (5, 4, 3, 1)), (2, (6, 5, 3, 1)), (3, (7, 5, 3, 1)), (4, (8, 6, 4, 1))]
)
def test_tapers_to_one(slack, held):
    plan = tiny_plan(4, 24)
    assert verify(Deep(slack).program(plan), plan).peak_spans == held


def least(p, m, f, b, c):
    """Return the shortest possible step time, in which the last stage never pauses.

    The first micro-batch travels to the last stage, the last stage then computes without a pause, and its last gradient
    travels back.
    """
    return (p - 1) * (f + c) + m * (f + b) + (p - 1) * (b + c)


@for_each("c", [0, 4, 10, 20])
@for_each(("p", "m"), [(2, 9), (4, 24), (8, 32)])
def test_step_time_with_slack_enough(p, m, c):
    """Check that a step takes (m + p - 1)(f + b) + 2 (p - 1) c if the slack is large enough.

    The slack is three micro-batches larger than necessary, and at least one for each link.
    """
    f, b = 20, 40
    plan, costs = uniform(p, m, f=f, b=b, link=c)
    enough = max(p - 1, -(-2 * (p - 1) * c // (f + b)) + 3) if c else 0
    found = simulate(Deep(enough).program(plan), plan, costs).makespan
    assert found == least(p, m, f, b, c) == (m + p - 1) * (f + b) + 2 * (p - 1) * c


@pytest.mark.parametrize("c", [20, 40, 60])
@pytest.mark.parametrize("p", [2, 4])
def test_less_than_necessary_is_slower(p, c):
    """Check the step time if the slack is too small to hide the links.

    The first stage needs p + 2 (p - 1) c / (f + b) micro-batches. With one fewer, the pipeline waits in every round.
    """
    f, b, m = 20, 40, 48
    plan, costs = uniform(p, m, f=f, b=b, link=c)
    too_few = -(-2 * (p - 1) * c // (f + b)) - 1
    found = simulate(Deep(too_few).program(plan), plan, costs).makespan
    assert found >= least(p, m, f, b, c) + (m // (p + too_few) - 1) * (2 * (p - 1) * c - too_few * (f + b))
    assert found > least(p, m, f, b, c)


@pytest.mark.parametrize("link", [20, 40, 60])
def test_beats_kfkb_that_holds_as_much_in_all(link):
    """Check that Deep with less memory is at least as fast as 2F2B.

    With Deep, the first stage holds 7 micro-batches and all stages hold 16. With 2F2B, the numbers are 8 and 20.
    """
    plan, costs = uniform(4, 24, f=20, b=40, link=link)
    deep, two = Deep(slack=3).program(plan), KFKB(k=2).program(plan)
    assert sum(verify(deep, plan).peak_spans) == 16
    assert sum(verify(two, plan).peak_spans) == 20
    assert simulate(deep, plan, costs).makespan <= simulate(two, plan, costs).makespan


@pytest.mark.parametrize(("slack", "seconds"), [(2, 2.071), (3, 1.738), (4, 1.735)])
def test_steps_that_were_measured(slack, seconds):
    """Compare simulated steps with measured ones.

    The measured runs had four stages, 24 micro-batches, F of 20 ms, B of 40 ms, and real links shaped to 20 ms per
    message.
    """
    plan, costs = uniform(4, 24, f=20, b=40, link=20)
    assert simulate(Deep(slack).program(plan), plan, costs).makespan == pytest.approx(seconds * 1e3, rel=0.01)
