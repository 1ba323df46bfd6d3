"""Schemes: what they take, and the best ones, all forwards before all backwards."""

from lightning_pipes.strategies.umpipe.search.evaluate import evaluated
from lightning_pipes.strategies.umpipe.search.exact import optimal
from lightning_pipes.strategies.umpipe.search.genetic import Evolved, Genetic, evolved
from lightning_pipes.strategies.umpipe.search.greedy import global_greedy, gpipe, local_greedy
from lightning_pipes.strategies.umpipe.search.kernel import load_loops
from lightning_pipes.strategies.umpipe.search.solved import Solved

__all__ = [
    "Evolved",
    "Genetic",
    "Solved",
    "evaluated",
    "evolved",
    "global_greedy",
    "gpipe",
    "load_loops",
    "local_greedy",
    "optimal",
]
