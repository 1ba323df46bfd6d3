"""Evaluation of schemes, and searches for the best scheme that runs all forwards before all backwards."""

from lightning_pipes.strategies.umpipe.search.chain import SchemeSolution, evaluate_schemes
from lightning_pipes.strategies.umpipe.search.exact import (
    best_equal_scheme,
    global_greedy,
    local_greedy,
    search_optimum,
)
from lightning_pipes.strategies.umpipe.search.genetic import EvolutionResult, SchemeEvolution, evolve_schemes
from lightning_pipes.strategies.umpipe.search.kernel import load_loops

__all__ = [
    "EvolutionResult",
    "SchemeEvolution",
    "SchemeSolution",
    "evaluate_schemes",
    "evolve_schemes",
    "global_greedy",
    "best_equal_scheme",
    "load_loops",
    "local_greedy",
    "search_optimum",
]
