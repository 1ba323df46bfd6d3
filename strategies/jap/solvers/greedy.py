"""Algorithm 1 of ArrayPipe as it is printed: one pass, no way back."""

from __future__ import annotations

import numpy as np

from lightning_pipes.strategies.jap.problem import ArrayProblem
from lightning_pipes.strategies.jap.solvers.bounds import lower_bound
from lightning_pipes.strategies.jap.solvers.kernel import kernel_for
from lightning_pipes.strategies.jap.solvers.solution import Solution
from lightning_pipes.strategies.jap.solvers.tables import Begun, Rest


def as_printed(problem: ArrayProblem) -> Solution:
    """The paper's branch and bound (S IV-B, Algorithm 1): block by block it commits to the one with the least
    bound, the last of equals, and never returns; so nothing says that the result is best. See `branch` for a search.

    Read with its sets made anew at each block, which the print forgets. The bound of a stage is that of interrupted
    blocks (Jackson): the exact 1|r_j|L_max is NP-hard.
    """
    by = kernel_for(problem.blocks * problem.jobs * problem.blocks // 2)
    n, j, s = problem.blocks, problem.jobs, problem.stages
    starts = by.fill(n)
    begun = Begun(by.fill(j), by.fill(j), by.fill(s), by.fill(s, -1))
    by.run.constructed(problem.read(by), begun, Rest(by.fill(n), *(by.fill(2 * j) for _ in range(3))), starts)
    found = np.array(starts, np.int64)
    return Solution(problem, found, problem.makespan(found), lower_bound(problem), "algorithm 1")
