from lightning_pipes.ir import Kind, Plan, verify
from lightning_pipes.sim import simulate
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.testing.conformance import ScheduleConformance
from lightning_pipes.testing.generators import tiny_plan, uniform
from tests.cases import for_each


class TestGPipe(ScheduleConformance):
    schedules = [GPipe()]


class TestGPipeWithTwoStagesARank(ScheduleConformance):
    schedules = [GPipe()]
    stages_per_rank = 2


def test_small_order():
    program = GPipe().program(tiny_plan(stages=2, microbatches=2))
    assert program.to_lines() == ["F0.0 F0.1 B0.0 B0.1 STEP0", "F1.0 F1.1 B1.0 B1.1 STEP1"]


@for_each("m", [1, 2, 3, 8, 17])
@for_each("p", [1, 2, 4, 8])
def test_step_time(p, m):
    plan, costs = uniform(stages=p, microbatches=m, f=1, b=2)
    timeline = simulate(GPipe().program(plan), plan, costs)
    assert timeline.makespan == (m + p - 1) * (1 + 2)
    assert timeline.bubble == (1 - m / (m + p - 1),) * p  # (p - 1) / (m + p - 1), section 2.3


def test_holds_every_microbatch():
    plan = tiny_plan(3, 5)
    assert verify(GPipe().program(plan), plan).peak_spans == (5, 5, 5)


def test_stages_of_one_rank_follow_each_other_without_a_message():
    plan = Plan.even(4, 2, ranks=(0, 0, 1, 1))
    timeline = simulate(GPipe().program(plan), plan, uniform(4, 2, f=1, b=2)[1])
    assert {(e.instruction.kind, e.instruction.stage) for e in timeline.transfers} == {(Kind.SF, 1), (Kind.SB, 2)}
