"""Check the inner loops of the solvers with and without numba."""

import pytest

from lightning_pipes.strategies.jap import Effort
from lightning_pipes.strategies.jap.solvers.kernel import SOLVER_KERNELS
from lightning_pipes.strategies.jap.solvers.rules import order_by_rule
from lightning_pipes.strategies.jap.solvers.search import search_orders
from lightning_pipes.strategies.jap.solvers.solve import branch_and_bound, solve_as_printed
from tests.strategies.jap.random_arrays import random_array


@pytest.mark.skipif(SOLVER_KERNELS.numba is None, reason="numba is not installed")
def test_the_same_with_and_without_numba(monkeypatch):
    problem = random_array(9, 5, imbalance=0.3, seed=2)
    small = random_array(4, 3, seed=1)
    tried = []
    for kernel in (SOLVER_KERNELS.python, SOLVER_KERNELS.numba):
        for module in ("search", "solve", "rules"):
            monkeypatch.setattr(
                f"lightning_pipes.strategies.jap.solvers.{module}.kernel_for", lambda blocks, k=kernel: k
            )
        monkeypatch.setitem(SOLVER_KERNELS.__dict__, "numba", kernel)
        found = [search_orders(problem, Effort(10_000), 3), solve_as_printed(problem)]
        found.append(branch_and_bound(small, Effort(2_000), order_by_rule(small, "pyramid")))
        tried.append([(f.makespan, f.bound, f.starts.tolist()) for f in found])
    assert tried[0] == tried[1]
