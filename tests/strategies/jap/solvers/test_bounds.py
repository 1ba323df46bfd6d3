"""Compare lower bounds with numbers by hand and with all orders."""

import numpy as np
import pytest

from lightning_pipes.strategies.jap import Effort, solve_array
from lightning_pipes.strategies.jap.problem import ArrayProblem
from lightning_pipes.strategies.jap.solvers.bounds import lower_bound, preemptive_bound, two_stage_bound
from lightning_pipes.strategies.jap.solvers.search import search_orders
from tests.strategies.jap.by_hand import best_of_all, random_problem


def test_bounds_by_hand():
    """Check two jobs with f = 2 and b = 3 on two stages, with transfers of 1.

    Stage 1 starts after 3, computes for 10, and 4 remain after its last block.
    """
    two, three, one = (np.full((2, 2), n) for n in (2, 3, 1))
    problem = ArrayProblem(two, three, transfer=one, transfer_back=one)
    assert preemptive_bound(problem) == (2 + 1) + 2 * (2 + 3) + (1 + 3)
    assert solve_array(problem).makespan == 17


def test_a_stage_knows_the_longest_job_and_its_own_work():
    for seed in range(20):
        problem = random_problem(seed, 1 + seed % 4, 1 + seed % 3)
        busy, heads, tails = (
            a.reshape(problem.stages, -1)
            for a in (problem.busy_times - problem.saved_times, problem.earliest_starts, problem.least_rests)
        )
        work = heads.min(1) + busy.sum(1) + (tails - busy).min(1)
        assert preemptive_bound(problem) >= max(work.max(), problem.least_rests.max())


def test_two_stages_by_hand():
    """Check the bounds of an example with two stages, in which one stage alone would need 7.

    Blocks take 1, except that B on stage 0 takes 2. The gradient of job 0 takes 2 to arrive. If stage 1 runs job 0
    first, the backward of job 0 runs on stage 0 from 5 to 7. If it runs job 0 second, from 3 to 5, the result is the
    same. Stage 0 runs only one block at a time, so both stages together need more.
    """
    one = np.ones((2, 2), np.int64)
    problem = ArrayProblem(one, np.array([[2, 1], [2, 1]]), transfer_back=np.array([[0, 2], [0, 0]]))
    assert (preemptive_bound(problem), two_stage_bound(problem), best_of_all(problem)) == (7, 8, 9)


@pytest.mark.parametrize("kind", range(4))
def test_no_order_beats_a_bound(kind):
    """Compare the bounds with all orders of small problems and with a search on larger ones.

    The larger ones mix long and short jobs, so that the bound of two stages exceeds the bound of one stage.
    """
    above = 0
    for seed in range(4):
        small = random_problem(seed, 2, 2 + kind % 2, late=(1, 9, 40)[seed % 3], early=kind == 3)
        assert lower_bound(small) <= best_of_all(small)
    for seed in range(6):
        rng = np.random.default_rng(seed)
        jobs, stages = int(rng.integers(4, 9)), int(rng.integers(2, 6))
        forward = np.repeat(rng.integers(1, 60, (jobs, 1)), stages, axis=1)
        update = rng.integers(1, 20, (jobs, stages)) if kind == 1 else 0 * forward
        links = rng.integers(0, 20, (2, jobs, stages)) if kind == 2 else [0 * forward] * 2
        recompute = forward if kind == 3 else 0 * forward
        problem = ArrayProblem(forward, 2 * forward, recompute, update, 0 * forward, *links, kind == 3)
        above += two_stage_bound(problem) > preemptive_bound(problem)
        assert lower_bound(problem) <= search_orders(problem, Effort(3_000), seed, bound=1).makespan
    assert above
