"""Compare CP-SAT with the search."""

from importlib.util import find_spec

import pytest

from lightning_pipes.ir import PlanError
from lightning_pipes.strategies.jap import Effort, solve_array
from lightning_pipes.strategies.jap.solvers.rules import order_by_rule
from tests.strategies.jap.random_arrays import random_array


@pytest.mark.skipif(
    find_spec("ortools") is None, reason="OR-Tools is not installed: pip install lightning-pipes[proof]"
)
@pytest.mark.parametrize(("jobs", "stages"), [(3, 4), (4, 4), (3, 8), (4, 8)])
def test_search_equals_what_cp_sat_proves(jobs, stages):
    from lightning_pipes.strategies.jap.solvers.proof import prove_order

    for seed in range(2):
        problem = random_array(jobs, stages, imbalance=0.3, seed=seed)
        proof = prove_order(problem, 10, order_by_rule(problem, "pyramid"))
        problem.check(proof.starts)
        found = solve_array(problem, effort=Effort(40_000))
        assert proof.bound <= found.makespan
        if proof.gap == 0:
            assert found.makespan == proof.makespan


@pytest.mark.skipif(find_spec("ortools") is not None, reason="OR-Tools is installed")
def test_cp_sat_names_the_package_to_install():
    from lightning_pipes.strategies.jap.solvers.proof import prove_order

    problem = random_array(2, 2)
    with pytest.raises(PlanError, match=r"lightning-pipes\[proof\]"):
        prove_order(problem, 1, order_by_rule(problem, "pyramid"))
