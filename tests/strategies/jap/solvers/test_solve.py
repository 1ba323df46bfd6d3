"""Check the choice of the solver, and the properties of every solution."""

import pytest

from lightning_pipes.ir import PlanError
from lightning_pipes.strategies.jap import Effort, solve_array
from lightning_pipes.strategies.jap.problem import ArraySolution, time_order
from lightning_pipes.strategies.jap.solvers.bounds import lower_bound
from lightning_pipes.strategies.jap.solvers.kernel import SOLVER_KERNELS
from lightning_pipes.strategies.jap.solvers.rules import PRIORITY_RULES
from lightning_pipes.strategies.jap.solvers.solve import SOLVE_METHODS, solve_as_printed
from tests.strategies.jap.by_hand import random_problem
from tests.strategies.jap.random_arrays import random_array

PACKAGE = "lightning_pipes.strategies.jap.solvers"


@pytest.mark.parametrize("method", ["auto", *SOLVE_METHODS, *PRIORITY_RULES])
def test_all_give_an_order_that_holds(method):
    problem = random_array(6, 4, imbalance=0.3, seed=5)
    found = solve_array(problem, method, Effort(3000), seed=1)
    problem.check(found.starts)
    starts = time_order(problem, found.order, SOLVER_KERNELS.python)
    assert found.makespan == problem.makespan(found.starts) == problem.makespan(starts)
    assert found.bound <= found.makespan
    assert found.gap == found.makespan / found.bound - 1
    again = solve_array(problem, method, Effort(3000), seed=1)
    assert (again.starts == found.starts).all()


def test_auto_proves_small_arrays_and_searches_large_ones():
    assert solve_array(random_array(3, 4), effort=Effort(50_000)).gap == 0
    large = solve_array(random_array(6, 4), effort=Effort(2000))
    assert large.method == "search"
    assert solve_array(random_array(6, 4), effort=Effort(2000), threshold=30).method == "branch and bound"
    with pytest.raises(PlanError, match="no solver called 'magic'"):
        solve_array(random_array(2, 2), "magic")


def test_auto_is_at_least_as_good_as_every_other_method():
    """Check arrays with too many jobs for the exact search, but on few stages.

    Branch and bound proves some of them immediately.
    """
    proven = []
    for seed in range(12):
        problem = random_problem(seed, 5 + seed % 3, 2, most=60, late=20)
        found = solve_array(problem, effort=Effort(2_000))
        problem.check(found.starts)
        others = [
            solve_array(problem, method, Effort(2_000)) for method in ("algorithm 1", "branch and bound", "search")
        ]
        assert found.makespan <= min(other.makespan for other in others)
        assert found.bound >= lower_bound(problem)
        proven += [found.method] * (found.gap == 0)
    assert len(proven) >= 6
    assert "branch and bound" in proven


def test_auto_begins_with_algorithm_1s_order(monkeypatch):
    """Check the start of the search, also if the effort is too small for anything else."""
    problem = random_array(12, 4)
    best = ArraySolution(problem, problem.earliest_starts, 1, 1, "algorithm 1")
    seen = []

    def search(problem, effort, seed=0, bound=0, incumbent=None):
        seen.append(incumbent)
        return best

    monkeypatch.setattr(f"{PACKAGE}.solve.search_orders", search)
    assert solve_array(problem, effort=Effort(20_000)) is not None
    assert seen[0].starts.tolist() == solve_as_printed(problem).starts.tolist()
    solve_array(problem, effort=Effort(1_000))
    assert seen[-1] is None, "it would take more than the effort"
