"""ArrayPipe: the jobs of an array share one pipeline.

`streamed` is an array without rounds in virtual time, for predictions and as the schedule "jap"; `ArrayProblem` and
`solved` are the paper's iteration and everything that orders it. What trains siblings is `lightning_pipes.arrays`.
"""

from lightning_pipes.strategies.jap.problem import ArrayProblem, problem_of
from lightning_pipes.strategies.jap.rounds import RoundOrder, round_order
from lightning_pipes.strategies.jap.schedule import JAP
from lightning_pipes.strategies.jap.solvers.proof import proven
from lightning_pipes.strategies.jap.solvers.search import Effort
from lightning_pipes.strategies.jap.solvers.solution import Solution
from lightning_pipes.strategies.jap.solvers.solve import solved
from lightning_pipes.strategies.jap.stream import Job, Streamed, streamed

__all__ = [
    "JAP",
    "ArrayProblem",
    "Effort",
    "Job",
    "RoundOrder",
    "Solution",
    "Streamed",
    "problem_of",
    "proven",
    "round_order",
    "solved",
    "streamed",
]
