"""ArrayPipe: the jobs of an array share one pipeline.

`Stream` is an array without rounds in virtual time, for predictions and as the schedule "jap"; `ArrayProblem` and
`solved` are the paper's iteration and everything that orders it. What trains siblings is `lightning_pipes.arrays`.
"""

from lightning_pipes.strategies.jap.problem import ArrayProblem, problem_of
from lightning_pipes.strategies.jap.rounds import round_order
from lightning_pipes.strategies.jap.schedule import JAP
from lightning_pipes.strategies.jap.search import Effort
from lightning_pipes.strategies.jap.solution import Solution
from lightning_pipes.strategies.jap.solve import solved
from lightning_pipes.strategies.jap.stream import Job, Piece, Stream
from lightning_pipes.strategies.jap.tuning import Setup, tuned

__all__ = [
    "JAP",
    "ArrayProblem",
    "Effort",
    "Job",
    "Piece",
    "Setup",
    "Solution",
    "Stream",
    "problem_of",
    "round_order",
    "solved",
    "tuned",
]
