"""Searches for the best scheme that runs all forwards before all backwards."""

from lightning_pipes.strategies.umpipe.search.chain import SchemeSolution
from lightning_pipes.strategies.umpipe.search.exact import search_optimum
from lightning_pipes.strategies.umpipe.search.genetic import EvolutionResult, SchemeEvolution, evolve_schemes

__all__ = ["EvolutionResult", "SchemeEvolution", "SchemeSolution", "evolve_schemes", "search_optimum"]
