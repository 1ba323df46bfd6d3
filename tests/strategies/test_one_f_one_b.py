import pytest

from lightning_pipes.ir import verify
from lightning_pipes.sim import simulate
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.testing.conformance import ScheduleConformance
from lightning_pipes.testing.generators import tiny_plan, uniform
from tests.cases import for_each


class TestOneFOneB(ScheduleConformance):
    schedules = [OneFOneB()]

    def most_held(self, schedule, plan, stage):
        return min(plan.n_stages - stage, len(plan.jobs[0].forward[0]))


def test_small_order():
    program = OneFOneB().program(tiny_plan(stages=2, microbatches=3))
    assert program.to_lines() == ["F0.0 F0.1 B0.0 F0.2 B0.1 B0.2 STEP0", "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2 STEP1"]


@for_each("m", [1, 2, 3, 8, 17])
@for_each("p", [1, 2, 4, 8])
def test_step_time(p, m):
    plan, costs = uniform(stages=p, microbatches=m, f=1, b=2)
    assert simulate(OneFOneB().program(plan), plan, costs).makespan == (m + p - 1) * (1 + 2)


@pytest.mark.parametrize(("f", "b"), [(2, 3), (5, 1), (7, 7)])
def test_step_time_for_any_ratio_of_forward_to_backward(f, b):
    plan, costs = uniform(stages=4, microbatches=6, f=f, b=b)
    assert simulate(OneFOneB().program(plan), plan, costs).makespan == (6 + 4 - 1) * (f + b)


def test_holds_one_microbatch_per_later_stage():
    plan = tiny_plan(4, 9)
    assert verify(OneFOneB().program(plan), plan).peak_spans == (4, 3, 2, 1)


def test_simulated_memory_is_what_it_holds():
    plan, costs = uniform(4, 9, f=1, b=2, activation_bytes=10)
    assert simulate(OneFOneB().program(plan), plan, costs).peak_bytes == (40, 30, 20, 10)
