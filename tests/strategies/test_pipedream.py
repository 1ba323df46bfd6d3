import pytest

from lightning_pipes.ir import Cut, Plan, PlanError, adapt_plan, even_spans, verify
from lightning_pipes.sim import simulate
from lightning_pipes.strategies.pipedream import PipeDream
from lightning_pipes.strategies.pipedream_2bw import PipeDream2BW
from lightning_pipes.testing.conformance import ScheduleConformance
from lightning_pipes.testing.generators import tiny_plan, uniform
from tests.cases import for_each


class TestPipeDream(ScheduleConformance):
    schedules = [PipeDream()]
    refused = [lambda: PipeDream().program(tiny_plan(4, 4, ranks=(0, 1, 0, 1)))]

    def most_held(self, schedule, plan, stage):
        return plan.n_stages - stage


class TestPipeDream2BW(ScheduleConformance):
    schedules = [PipeDream2BW()]
    refused = [
        lambda: PipeDream2BW().program(planned(4, 2, PipeDream2BW())),
        lambda: PipeDream2BW().program(tiny_plan(4, 4, ranks=(0, 1, 0, 1))),
    ]
    microbatches = (3, 4, 5, 8)

    def most_held(self, schedule, plan, stage):
        return plan.n_stages - stage


def planned(p, m, schedule):
    return adapt_plan(tiny_plan(p, m), schedule)


def test_small_order():
    plan = planned(3, 1, PipeDream())
    assert PipeDream().program(plan).unroll(4).to_lines() == [
        "F0.0 F0.0@1 F0.0@2 B0.0 STEP0 F0.0@3 B0.0@1 STEP0@1 B0.0@2 STEP0@2 B0.0@3 STEP0@3",
        "F1.0 F1.0@1 B1.0 STEP1 F1.0@2 B1.0@1 STEP1@1 F1.0@3 B1.0@2 STEP1@2 B1.0@3 STEP1@3",
        "F2.0 B2.0 STEP2 F2.0@1 B2.0@1 STEP2@1 F2.0@2 B2.0@2 STEP2@2 F2.0@3 B2.0@3 STEP2@3",
    ]


def test_small_order_of_2bw():
    """Check the order of two batches, in which the last stage updates only after the next batch has started."""
    plan = planned(2, 2, PipeDream2BW())
    assert PipeDream2BW().program(plan).unroll(2).to_lines() == [
        "F0.0 F0.1 B0.0 F0.0@1 B0.1 STEP0 F0.1@1 B0.0@1 B0.1@1 STEP0@1",
        "F1.0 B1.0 F1.1 B1.1 F1.0@1 STEP1 B1.0@1 F1.1@1 B1.1@1 STEP1@1",
    ]


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
def test_versions_and_staleness_of_the_paper(p):
    """Check section 3.3: stage s of p (from 0) keeps p - s versions, and its updates are p - 1 - s updates late."""
    plan = planned(p, 1, PipeDream())
    assert plan.versions == tuple(p - s for s in range(p))
    facts = verify(PipeDream().program(plan), plan, 3 * p)
    assert facts.versions == plan.versions
    assert facts.staleness == tuple(p - 1 - s for s in range(p))
    assert facts.peak_spans == tuple(p - s for s in range(p))


@for_each("m", [1, 2, 3, 4, 7])
@for_each("p", [1, 2, 4, 6])
def test_several_microbatches_need_fewer_versions(p, m):
    plan = planned(p, m, PipeDream())
    facts = verify(PipeDream().program(plan), plan, 2 * p)
    assert facts.versions == plan.versions
    assert facts.staleness == tuple(-(-(p - 1 - s) // m) for s in range(p))


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_2bw_keeps_two_versions_and_misses_one_update(p):
    for m in (max(1, p - 1), p, 2 * p + 1):
        plan = planned(p, m, PipeDream2BW())
        facts = verify(PipeDream2BW().program(plan), plan, 5)
        assert facts.versions == plan.versions == (2,) * p
        assert facts.staleness == (1,) * p
        assert facts.peak_spans == tuple(min(p - s, 2 * m) for s in range(p))


def test_2bw_with_too_few_microbatches_would_need_a_third():
    plan = planned(4, 2, PipeDream())
    assert max(verify(PipeDream().program(plan), plan, 8).versions) == 3
    with pytest.raises(PlanError, match="at least 3 micro-batches for 4 stages"):
        PipeDream2BW().program(plan)


@for_each("schedule", [PipeDream(), PipeDream2BW()])
@for_each("m", [4, 6])
@for_each("p", [1, 2, 4])
def test_no_bubble_once_it_flows(p, m, schedule):
    """Check that the ramps cost (p - 1)(f + b) once, and that every batch adds m (f + b)."""
    plan, costs = uniform(p, m, f=1, b=2)
    plan = adapt_plan(plan, schedule)
    program = schedule.program(plan)
    for batches in (1, 2, 5, 9):
        assert simulate(program, plan, costs, batches=batches).makespan == (batches * m + p - 1) * 3


def test_no_bubble_with_one_microbatch_a_batch():
    plan, costs = uniform(4, 1, f=1, b=2)
    plan = adapt_plan(plan, PipeDream())
    assert simulate(PipeDream().program(plan), plan, costs, batches=20).makespan == (20 + 4 - 1) * 3


def test_fewer_batches_than_fill_the_pipeline():
    plan = planned(4, 1, PipeDream())
    for batches in (1, 2, 3):
        verify(PipeDream().program(plan), plan, batches)


def test_refuses_spans_that_differ_between_stages():
    four, two = even_spans(4, 4), even_spans(4, 2)
    with pytest.raises(PlanError, match="same spans on all stages"):
        PipeDream().program(Plan((0, 1), (Cut(4, (four, two)),)))
