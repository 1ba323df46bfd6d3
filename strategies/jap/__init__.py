"""ArrayPipe: the jobs of an array share one pipeline.

`stream_jobs` simulates an array that runs without rounds. It predicts the duration of an array, and implements the
schedule "jap". `ArrayProblem` is the iteration that the paper orders, and `solve_array` searches for an order of its
blocks. The siblings of an array are trained by `lightning_pipes.arrays`.
"""

from lightning_pipes.strategies.jap.problem import ArrayProblem, ArraySolution, problem_from_plan
from lightning_pipes.strategies.jap.rounds import RoundOrder, round_order
from lightning_pipes.strategies.jap.schedule import JAP
from lightning_pipes.strategies.jap.solvers.proof import prove_order
from lightning_pipes.strategies.jap.solvers.search import Effort
from lightning_pipes.strategies.jap.solvers.solve import solve_array
from lightning_pipes.strategies.jap.stream import Job, StreamedArray, stream_jobs

__all__ = [
    "JAP",
    "ArrayProblem",
    "Effort",
    "Job",
    "RoundOrder",
    "ArraySolution",
    "StreamedArray",
    "problem_from_plan",
    "prove_order",
    "round_order",
    "solve_array",
    "stream_jobs",
]
