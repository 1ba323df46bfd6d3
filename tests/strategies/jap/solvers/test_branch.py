"""Compare branch and bound with brute force."""

import numpy as np
import pytest

from lightning_pipes.strategies.jap import Effort, solve_array
from lightning_pipes.strategies.jap.problem import ArrayProblem, time_order
from lightning_pipes.strategies.jap.solvers.bounds import lower_bound
from lightning_pipes.strategies.jap.solvers.kernel import SOLVER_KERNELS
from lightning_pipes.strategies.jap.solvers.rules import order_by_rule
from lightning_pipes.strategies.jap.solvers.solve import branch_and_bound
from tests.cases import for_each
from tests.strategies.jap.by_hand import best_of_all, random_problem

SIZES = [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2)]


# 8100 orders for each problem of size (3, 2)
SMALL = [(*size, seed) for size in SIZES for seed in range(1 if size == (3, 2) else 6)]


@for_each(("jobs", "stages", "seed"), SMALL)
def test_branch_and_bound_finds_what_brute_force_finds(jobs, stages, seed):
    check_optimal(jobs, stages, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_branch_and_bound_finds_what_brute_force_finds_in_8100_orders(seed):
    check_optimal(3, 2, seed)


def check_optimal(jobs, stages, seed):
    problem = random_problem(seed, jobs, stages, equal=seed % 3 == 0)
    best = best_of_all(problem)
    found = branch_and_bound(problem, Effort(100_000), order_by_rule(problem, "forward first"))
    problem.check(found.starts)
    assert (found.makespan, found.bound) == (best, best)
    assert problem.makespan(time_order(problem, found.order, SOLVER_KERNELS.python)) == best
    assert lower_bound(problem) <= best <= solve_array(problem, "search", Effort(2_000), seed).makespan
    chosen = solve_array(problem, effort=Effort(100_000))
    assert (chosen.makespan, chosen.gap) == (best, 0)


@for_each(("seed", "stages"), [*((n, 2) for n in range(20)), *((n, 3) for n in (5, 7, 29, 44, 56))])
def test_stages_may_be_held_for_a_block_that_is_not_there_yet(seed, stages):
    """Check that a stage may wait for a block that has not arrived yet.

    After a long update, a job's next block can arrive before the available block could end.
    """
    problem = random_problem(seed, 2, stages, most=4, equal=stages == 2 and seed % 2 == 0, late=40)
    best = best_of_all(problem)
    assert lower_bound(problem) <= best
    assert branch_and_bound(problem, Effort(100_000), order_by_rule(problem, "forward first")).makespan == best


def test_recomputation_before_the_gradient_is_there():
    """Compare branch and bound with brute force if a recomputation may start before its gradient arrives.

    The best orders are never longer than without early recomputation, and a search finds most of them.
    """
    gained, searched = 0, 0
    for seed in range(8):
        late, early = (random_problem(seed, 2, 2 + seed % 2, early=early) for early in (False, True))
        best = best_of_all(early)
        found = branch_and_bound(early, Effort(100_000), order_by_rule(early, "forward first"))
        early.check(found.starts)
        assert (found.makespan, found.bound) == (best, best)
        assert best <= best_of_all(late)
        searched += best == solve_array(early, "search", Effort(2_000), seed).makespan
        gained += best < best_of_all(late)
        backward = found.starts.reshape(early.stages, 2, early.jobs)[:, 1].T
        gradient = backward + early.recompute + early.backward + early.transfer_back
        assert (gradient[:, 1:] <= (backward + early.recompute)[:, :-1]).all()
    assert gained >= 4
    assert searched >= 7


def test_a_switch_is_saved_where_a_backward_follows_its_forward():
    """Check that a stage saves a switch if the backward of a job directly follows its forward.

    There is one stage with two jobs. F and B take 1 each and a switch takes 3. Every solver runs one job completely
    before the other, so the stage switches after the first B and after the last one.
    """
    one = np.ones((2, 1), np.int64)
    problem = ArrayProblem(one, one, switch=3 * one)
    assert best_of_all(problem) == (1 + 1 + 3) * 2
    for method in ("branch and bound", "search", "algorithm 1", "genetic", "backward first"):
        found = solve_array(problem, method, Effort(2_000))
        assert found.makespan == 10, method
        problem.check(found.starts)
    assert order_by_rule(problem, "forward first").makespan == (1 + 3) * 4
