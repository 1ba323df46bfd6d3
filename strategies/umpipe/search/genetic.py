"""The paper's genetic algorithms: GAP, DGAP, OiDGAP, TiGAP and TiDGAP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lightning_pipes.ir import InputError, check_count, check_number
from lightning_pipes.strategies.umpipe.network import Scheme, Times
from lightning_pipes.strategies.umpipe.search.chain import (
    Chain,
    CutTables,
    SchemeSolution,
    chains_of_network,
    evaluate_genes,
)

Evaluator = Callable[[Chain, Times], Any]
"""Function that returns the time at which the batch has left the chain, for each row of genes."""


CHROMOSOMES = {"GAP": 1, "DGAP": 2, "OiDGAP": 2, "TiGAP": 1, "TiDGAP": 2}
"""The number of chromosomes of an individual.

The five methods also differ in how they evaluate an individual, but the values are the same.
"""


@dataclass(frozen=True)
class SchemeEvolution:
    """Settings of an evolution. The paper does not specify all of them.

    Attributes:
        population: the number of individuals, and the number of children in each generation.
        generations: the number of generations.
        mutation: the probability that a gene is drawn again.
        start: the initial population. "equal" begins with GPipe's schemes, or with the best of them if there are more
            schemes than individuals, and adds random individuals. "random" draws all individuals at random.
    """

    population: int = 100
    generations: int = 100
    mutation: float = 0.02
    start: Literal["equal", "random"] = "equal"

    def __post_init__(self) -> None:
        check_count("population", self.population)
        check_count("generations", self.generations)
        check_number("mutation", self.mutation, "a share from 0 to 1", lambda x: 0 <= x <= 1)
        if self.start not in ("equal", "random"):
            raise InputError(f"start must be 'equal' or 'random', got {self.start!r}")


@dataclass(frozen=True)
class EvolutionResult:
    """The result of an evolution.

    Attributes:
        best: the best individual, as the paper returns it.
        recombined: the best forward genes and the best backward genes of all survivors, which do not depend on each
            other.
        history: the value of the best individual at the start and after each generation.
    """

    best: SchemeSolution
    recombined: SchemeSolution
    history: tuple[int, ...]


def evolve_schemes(
    network: CutTables,
    method: str = "TiDGAP",
    seed: int = 0,
    settings: SchemeEvolution | None = None,
    evaluator: Evaluator = evaluate_genes,
) -> EvolutionResult:
    """Return the best scheme of an evolving population (A2).

    With two chromosomes, forward genes C and backward genes D are selected by their own values: two parents from the
    better half by C, and two parents from the better half by D. With one chromosome, two parents are drawn from the
    better half by the sum of both values. Each pair of parents is mixed gene by gene at random. Parents and children
    compete for the next generation by the sum of both directions.

    Args:
        network: the times of all processes and options.
        method: one of `CHROMOSOMES`.
        seed: the seed of the random numbers.
        settings: the settings of the evolution. None means the defaults.
        evaluator: the function that evaluates genes, by default a compiled loop. The paper's evaluators result in the
            same populations.

    Raises:
        InputError: the method is unknown.
    """
    if method not in CHROMOSOMES:
        raise InputError(f"no genetic algorithm {method!r}; there are {', '.join(CHROMOSOMES)}")
    population = _Population(network, settings or SchemeEvolution(), np.random.default_rng(seed), evaluator)
    history = [int(population.values.sum(axis=0).min())]
    for _ in range(population.settings.generations):
        population.breed_generation(CHROMOSOMES[method])
        history.append(int(population.values.sum(axis=0).min()))
    best = int(population.values.sum(axis=0).argmin())
    apart = population.values.argmin(axis=1)
    return EvolutionResult(
        population.make_solution(best, best), population.make_solution(*apart.tolist()), tuple(history)
    )


class _Population:
    """The individuals of one generation.

    Attributes:
        genes: (direction, individual, process) the option of each process.
        values: (direction, individual) the time at which the batch has left the chain.
    """

    def __init__(
        self, network: CutTables, settings: SchemeEvolution, rng: np.random.Generator, evaluator: Evaluator
    ) -> None:
        self.chains, self.settings, self.rng, self.evaluator = chains_of_network(network), settings, rng, evaluator
        chain = self.chains[0]
        self.options = chain.options
        self.genes = rng.integers(0, self.options, (2, settings.population, chain.processes))
        if settings.start == "equal":
            worth = sum(evaluate_genes(each, each.equal_schemes) for each in self.chains)
            best = np.argsort(worth, kind="stable")[: settings.population]
            self.genes[:, : len(best)] = best[:, None]
        self.values = self.evaluate_genes(self.genes)

    def evaluate_genes(self, genes: Times) -> Times:
        """Return the times of both directions for each individual."""
        return np.stack(
            [np.asarray(self.evaluator(chain, each), np.int64) for chain, each in zip(self.chains, genes, strict=True)]
        )

    def breed_generation(self, chromosomes: int) -> None:
        """Replace the individuals by the next generation."""
        total = self.values.sum(axis=0)
        count, better = len(total), max(1, len(total) // 2)
        ranks = np.argsort(self.values if chromosomes == 2 else total[None], axis=1, kind="stable")[:, :better]
        drawn = self.rng.integers(0, better, (chromosomes, 2, count))
        parents = np.take_along_axis(ranks, drawn.reshape(chromosomes, -1), axis=1).reshape(chromosomes, 2, count)
        mother, father = (
            np.stack([self.genes[d, parents[d % chromosomes, which]] for d in range(2)]) for which in range(2)
        )
        children = np.where(self.rng.random(mother.shape) < 0.5, mother, father)
        mutants = self.rng.random(children.shape) < self.settings.mutation
        children[mutants] = self.rng.integers(0, self.options, int(mutants.sum()))
        genes = np.concatenate([self.genes, children], axis=1)
        values = np.concatenate([self.values, self.evaluate_genes(children)], axis=1)
        kept = np.argsort(values.sum(axis=0), kind="stable")[:count]
        self.genes, self.values = genes[:, kept], values[:, kept]

    def make_solution(self, forward: int, backward: int) -> SchemeSolution:
        """Return the solution with the forward genes of one individual and the backward genes of another."""
        there, back = self.genes[0, forward].tolist(), self.genes[1, backward].tolist()
        return SchemeSolution(
            Scheme(tuple(there), tuple(back)), int(self.values[0, forward] + self.values[1, backward]), 0
        )
