"""Tests of the costs of unlike jobs that share a pipeline."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_pipes.cost import CostModel, JobCosts, Link
from lightning_pipes.ir import STEP, B, Cut, F, InputError, Instruction, Kind, Plan, Program, Span
from lightning_pipes.sim import simulate
from lightning_pipes.strategies.jap import RoundOrder, problem_from_plan
from tests.strategies.jap.by_hand import best_of_all, timed

ONE, TWO = Span(0, 1), Span(0, 2)
SMALL, LARGE = Plan((0, 1), (Cut.even(1, 1, 2),)), Plan((0, 1), (Cut.even(2, 1, 2),), recompute=(True, False))


def model(first: float, second: float, overhead: float = 0.0) -> CostModel:
    """Return the costs of two stages. A forward takes these seconds a sample, and a backward twice as long."""
    seconds = {(Kind.F, s): ((0, 0.0), (1, t)) for s, t in enumerate((first, second))}
    seconds |= {(Kind.B, s): ((0, 0.0), (1, 2 * t)) for s, t in enumerate((first, second))}
    bytes_of = {"forward_bytes": (1000.0 * first,), "backward_bytes": (2000.0 * first,)}
    memory = {"activation_bytes": (int(10 * first), 7), "weight_bytes": (int(first), int(second))}
    return CostModel(seconds, overhead=overhead, link=Link(1000.0), **bytes_of, **memory)


COSTS = JobCosts((SMALL, LARGE), (model(1, 2, 0.5), model(3, 1, 0.75)))


def test_each_job_has_the_costs_that_it_has_alone() -> None:
    """Compare the problem of a round, messages and memory with those of each job alone."""
    problem = problem_from_plan(COSTS.plan, COSTS)
    for job, (plan, costs) in enumerate(zip(COSTS.plans, COSTS.models, strict=True)):
        alone = problem_from_plan(plan, costs)
        for name in ("forward", "backward", "transfer", "transfer_back"):
            assert getattr(problem, name)[job].tolist() == getattr(alone, name)[0].tolist(), name
        for i in (F(0, TWO), B(0, TWO), B(1, TWO)):
            assert COSTS.memory_change(i._replace(job=job), COSTS.plan) == costs.memory_change(i, plan)
    assert problem.backward[1].tolist() == [10**9 * (0.75 + 2 * (6 + 3)), 10**9 * (0.75 + 2 * 2)], "stage 0 recomputes"
    assert [COSTS.resident_bytes(rank, COSTS.plan) for rank in range(2)] == [1 + 3, 2 + 1]
    assert COSTS.transfer_ns(Instruction(Kind.SF, 0, 1, 0, TWO), COSTS.plan) == (6 * 10**9, 0)


def test_unlike_jobs_are_simulated() -> None:
    """Compare the times of one batch of each job with times by hand, in seconds."""
    first = (F(0, ONE, 0), F(0, TWO, 1), B(0, ONE, 0), STEP(0, 0), B(0, TWO, 1), STEP(0, 1))
    last = (F(1, ONE, 0), B(1, ONE, 0), STEP(1, 0), F(1, TWO, 1), B(1, TWO, 1), STEP(1, 1))
    free = JobCosts(COSTS.plans, tuple(replace(each, overhead=0.0, link=Link()) for each in COSTS.models))
    timeline = simulate(Program((first, last)), free.plan, free)
    ends = {
        (e.instruction.kind.name, e.instruction.stage, e.instruction.job): e.end / 1e9 for e in timeline.computations
    }
    assert [ends["F", 0, job] for job in range(2)] == [1, 7]
    assert [ends["B", 1, job] for job in range(2)] == [7, 13], "the last stage waits for the first forward of job 1"
    assert [ends["B", 0, job] for job in range(2)] == [9, 31]


def test_the_order_of_a_round_considers_each_job() -> None:
    """Check that the order is optimal, and that the order for the costs of one job is not."""
    plans, models = (SMALL,) * 3, (model(2, 5), model(1, 3), model(1, 4))
    costs = JobCosts(plans, models)
    problem = problem_from_plan(costs.plan, costs)
    best = best_of_all(problem)
    for used, is_best in ((costs, True), (JobCosts(plans, models[:1] * 3), False)):
        program = RoundOrder("branch and bound")(costs.plan, used)
        rows = [[(i.job, i.kind.name) for i in row if i.kind is not Kind.STEP] for row in program.head]
        assert bool(timed(problem, rows)[1] == best) is is_best


@pytest.mark.parametrize(
    ("plans", "models"),
    [
        ((), ()),
        ((SMALL, LARGE), (model(1, 1),)),
        ((replace(SMALL, jobs=SMALL.jobs * 2),), (model(1, 1),)),
        ((SMALL, replace(LARGE, ranks=(1, 0))), (model(1, 1),) * 2),
    ],
)
def test_jobs_that_do_not_belong_together_are_refused(plans: tuple[Plan, ...], models: tuple[CostModel, ...]) -> None:
    with pytest.raises(InputError, match="one plan and one cost model for each job, with equal ranks"):
        JobCosts(plans, models)
