"""Compare the times of a problem with the simulator, which executes programs instead of blocks."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from lightning_pipes.cost import CostModel
from lightning_pipes.ir import Cut, Kind, Plan, PlanError, verify
from lightning_pipes.sim import simulate
from lightning_pipes.strategies.jap.problem import BLOCK_TIMES, ArrayProblem, problem_from_plan, time_order
from lightning_pipes.strategies.jap.rounds import program_from_order
from lightning_pipes.strategies.jap.solvers import rules
from lightning_pipes.strategies.jap.solvers.kernel import SOLVER_KERNELS
from tests.cases import for_each
from tests.strategies.jap.array_costs import ArrayCosts, plan_of
from tests.strategies.jap.by_hand import random_problem, rows_of_a_stage, timed
from tests.strategies.jap.random_arrays import batch_sizes, random_array, random_costs


def random_order(problem, seed):
    """Return a feasible order, made by a list schedule with random places."""
    rng = np.random.default_rng(seed)
    places = [rng.permutation(problem.jobs) for _ in range(2)]
    return problem.order_of(rules.start_times(problem, *places, int(rng.integers(3)), 5, SOLVER_KERNELS.python))


@for_each("seed", range(12))
def test_the_simulator_gives_the_same_times(seed):
    problem = random_problem(seed, jobs=1 + seed % 5, stages=1 + seed // 3)
    order = random_order(problem, seed)
    plan = plan_of(problem)
    program = program_from_order(order, plan)
    verify(program, plan)
    pairs = [(i, after) for row in program.head for i, after in pairwise(row) if i.kind is Kind.F]
    stays = frozenset((i.job, i.stage) for i, after in pairs if i.job == after.job)
    timeline = simulate(program, plan, ArrayCosts(problem, stays))
    starts = time_order(problem, order, SOLVER_KERNELS.python)
    problem.check(starts)
    for event in timeline.events:
        i = event.instruction
        if i.kind in (Kind.F, Kind.B):
            block = 2 * problem.jobs * i.stage + i.job + (problem.jobs if i.kind is Kind.B else 0)
            assert event.start == starts[block], i
    assert timeline.makespan >= problem.makespan(starts)
    assert problem.makespan(starts) == max(e.end for e in timeline.events if e.rank == 0)


def test_arrays_that_can_not_be_simulated_are_refused():
    with pytest.raises(PlanError, match="leave early_recompute out"):
        ArrayCosts(random_problem(0, 2, 2, early=True))


@pytest.mark.parametrize("early", [False, True])
def test_brute_force_gives_the_same_times(early):
    """Compare the times of all orders of two jobs on two stages, including the orders that deadlock."""
    problem = random_problem(3, 2, 2, early=early)
    deadlocks = 0
    for first in rows_of_a_stage(2):
        for second in rows_of_a_stage(2):
            rows = (first, second)
            numbers = np.array([[4 * s + j + 2 * (d == "B") for j, d in row] for s, row in enumerate(rows)])
            found = timed(problem, rows)
            if found is None:
                deadlocks += 1
                assert time_order(problem, numbers, SOLVER_KERNELS.python) is None
            else:
                starts = time_order(problem, numbers, SOLVER_KERNELS.python)
                assert problem.makespan(starts) == found[1]
                assert all(starts[4 * s + j + 2 * (d == "B")] == t for (j, d, s), t in found[0].items())
    assert deadlocks


def test_a_job_alone_takes_head_and_tail():
    problem = random_problem(1, 3, 4)
    for job in range(3):
        one = replace(problem, **{name: getattr(problem, name)[[job]] for name in BLOCK_TIMES})
        starts = time_order(one, np.arange(8).reshape(4, 2), SOLVER_KERNELS.python)
        mine = np.arange(8) * 3 + job
        assert (problem.earliest_starts[mine] == starts).all()
        assert (problem.earliest_starts[mine] + problem.least_rests[mine] == one.makespan(starts)).all()


def test_made_from_costs():
    """Check whole batches, a recomputation as part of the backward, and both directions of a link."""
    seconds = {(Kind.F, 0): ((1, 1.0), (2, 3.0)), (Kind.F, 1): ((1, 2.0),), (Kind.B, 0): ((1, 5.0),)}
    seconds |= {(Kind.B, 1): ((1, 7.0),), (Kind.STEP, 1): ((0, 0.5),)}
    seconds |= {(Kind.SF, 0): ((1, 0.1),), (Kind.SB, 1): ((1, 0.2),)}
    plan = Plan((0, 1), (Cut.even(1, 1, 2), Cut.even(2, 2, 2)), recompute=(False, True))
    problem = problem_from_plan(plan, CostModel(seconds), switch=0.25)
    each = {name: (getattr(problem, name) / 1e9).tolist() for name in ("forward", "backward", "update", "switch")}
    assert each["forward"] == [[1, 2], [3, 2]]
    assert each["backward"] == [[5, 9], [5, 9]]
    assert each["update"] == [[0, 0.5], [0, 0.5]]
    assert each["switch"] == [[0.25] * 2] * 2
    assert (problem.transfer / 1e9).tolist() == [[0.1, 0], [0.1, 0]]
    assert (problem.transfer_back / 1e9).tolist() == [[0, 0.2], [0, 0.2]]


def test_generator():
    """Check that a seed determines an array, and that jobs with equal batch sizes are equal."""
    one, two = random_array(8, 4, seed=3), random_array(8, 4, seed=3)
    assert (one.busy_times == two.busy_times).all()
    assert (one.busy_times != random_array(8, 4, seed=4).busy_times).any()
    assert one.equal_jobs.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert (one.busy_times % 10_000 == 0).all()
    assert sorted(batch_sizes(64).tolist()) == sorted([8, 16, 24, 32] * 16)
    wide = random_array(4, 8, imbalance=0.4)
    assert wide.forward[0].max() > 1.2 * wide.forward[0].min()
    free = random_costs(2, overhead=0)
    assert free.seconds_at(Kind.F, 0, 32) == pytest.approx(2 * free.seconds_at(Kind.F, 0, 16))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda f: ArrayProblem(f[0], f), "shape"),
        (lambda f: ArrayProblem(f, f[:1]), "backward"),
        (lambda f: ArrayProblem(f, f, switch=-f), "switch"),
        (lambda f: ArrayProblem(f, f / 2), "whole nanoseconds"),
        (lambda f: ArrayProblem(0 * f, f), "at least a nanosecond"),
        (lambda f: ArrayProblem(f, f).check(np.zeros(12, np.int64)), "start before"),
        (lambda f: ArrayProblem(f, f).check(ArrayProblem(f, f).earliest_starts), "two blocks at once"),
    ],
)
def test_refused(change, says):
    with pytest.raises(PlanError, match=says):
        change(np.ones((2, 3), np.int64))
