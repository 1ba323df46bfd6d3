"""Check the schedule for one Trainer's batch and for several jobs of a plan."""

import pytest

from lightning_pipes.ir import Cut, Plan, PlanError, verify
from lightning_pipes.sim import simulate
from lightning_pipes.strategies.jap import JAP
from lightning_pipes.testing.conformance import ScheduleConformance
from lightning_pipes.testing.generators import tiny_plan, uniform


class TestJAP(ScheduleConformance):
    schedules = [JAP()]
    refused = [
        lambda: JAP().program(tiny_plan(4, 2, ranks=(0, 1, 0, 1))),
        lambda: JAP().program(Plan((0, 1), (Cut.even(2, 1, 2),), split_backward=True)),
    ]


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 4), (4, 8), (4, 3)])
def test_one_job_takes_as_long_as_1f1b(p, m):
    plan, costs = uniform(stages=p, microbatches=m, f=1, b=2)
    assert simulate(JAP().program(plan), plan, costs).makespan == (m + p - 1) * 3


def test_several_jobs_fill_the_pipeline():
    """Check the makespan of four jobs with batches of one sample on four stages.

    At best, a stage computes for 72 of 81 ns, and the pipeline fills and drains in the rest. First come, first served
    takes 3 ns longer.
    """
    plan = Plan((0, 1, 2, 3), (Cut.even(1, 1, 4),) * 4, batches=6)
    _, costs = uniform(stages=4, microbatches=1, f=1, b=2)
    program = JAP().program(plan)
    verify(program, plan)
    assert simulate(program, plan, costs).makespan == 6 * 4 * 3 + 3 * 3 + 3


def test_refuses_what_one_job_may_not_have():
    cut = Cut(2, (Cut.even(2, 2, 1).forward[0], Cut.even(2, 1, 1).forward[0]))
    with pytest.raises(PlanError, match="same spans on all stages"):
        JAP().program(Plan((0, 1), (cut,)))
