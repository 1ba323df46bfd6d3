"""The genetic algorithm of ArrayPipe, computed for a whole generation at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_pipes.strategies.jap.problem import Array, ArrayProblem, ArraySolution
from lightning_pipes.strategies.jap.solvers.bounds import lower_bound
from lightning_pipes.strategies.jap.solvers.rules import PRIORITY_RULES, order_by_rule
from lightning_pipes.strategies.jap.solvers.search import Effort


@dataclass(frozen=True)
class OrderEvolution:
    """The settings that the paper does not specify.

    Attributes:
        population: the number of chromosomes.
        generations: the largest number of generations.
        mutation: the probability with which an individual is mutated.
        rivals: the number of individuals in a tournament.
        seeded: whether the first population contains the orders of all rules. Otherwise, it is random, as in the paper.
    """

    population: int = 100
    generations: int = 1_000_000
    mutation: float = 0.1
    rivals: int = 3
    seeded: bool = False


def evolve_orders(
    problem: ArrayProblem, effort: Effort, seed: int = 0, settings: OrderEvolution | None = None
) -> ArraySolution:
    """Return the best order of a population that evolves (S IV-B).

    A gene is the number of a job, and its n-th occurrence in a chromosome is the n-th block of the job, forwards and
    backwards. Parents are drawn with a probability proportional to 1 / makespan. Precedence operation crossover keeps
    the genes of some jobs from one parent, and takes the other genes in the order of the other parent. Mutation swaps
    two genes. The best individual, the children and the mutants form the next population, and tournaments among the old
    individuals fill the remaining places.

    Args:
        problem: the iteration.
        effort: the budget, which counts the individuals that are decoded.
        seed: the seed of the random numbers.
        settings: the settings of the evolution.
    """
    settings = settings or OrderEvolution()
    rng = np.random.default_rng(seed)
    genes = np.tile(np.repeat(np.arange(problem.jobs), 2 * problem.stages), (settings.population, 1))
    people = rng.permuted(genes, axis=1)
    if settings.seeded:
        people[: len(PRIORITY_RULES)] = [
            np.argsort(order_by_rule(problem, rule).starts, kind="stable") % problem.jobs for rule in PRIORITY_RULES
        ]
    spans = decode_genes(problem, people)[0]
    effort.spent += len(people)
    for _ in range(settings.generations):
        if not effort.is_left:
            break
        pairs = int(rng.integers(1, settings.population // 2 + 1))
        parents = people[_parents(spans, pairs, rng)]
        children = np.concatenate(_crossed(parents[:, 0], parents[:, 1], problem.jobs, rng))
        mutants = _swapped(people[rng.random(len(people)) < settings.mutation], rng)
        children = np.concatenate([children, mutants])[: settings.population - 1]
        fresh = decode_genes(problem, children)[0]
        effort.spent += len(children)
        winners = _winners(spans, settings.population - 1 - len(children), settings.rivals, rng)
        kept = np.concatenate([[spans.argmin()], winners])
        people, spans = np.concatenate([people[kept], children]), np.concatenate([spans[kept], fresh])
    _, starts = decode_genes(problem, people[spans.argmin()][None])
    return ArraySolution(problem, starts[0], int(spans.min()), lower_bound(problem), "genetic", effort.spent)


def decode_genes(problem: ArrayProblem, people: Array) -> tuple[Array, Array]:
    """Return the makespans and the starts of all chromosomes.

    Each block, from left to right, starts as early as its job and its stage allow.

    Args:
        problem: the iteration.
        people: the chromosomes, as job numbers of shape (individuals, blocks).

    Returns:
        Makespans of shape (individuals,), and starts by block number of shape (individuals, blocks), in nanoseconds.
    """
    count, n = people.shape
    width = 2 * problem.stages
    step = np.empty_like(people)  # the position of each gene's block in its job
    np.put_along_axis(step, np.argsort(people, axis=1, kind="stable"), np.tile(np.arange(width), problem.jobs)[None], 1)
    s = np.where(step < problem.stages, step, width - 1 - step)
    blocks = 2 * problem.jobs * s + np.where(step < problem.stages, 0, problem.jobs) + people
    busy, lag = problem.busy_times[blocks].T, problem.block_lags[blocks].T
    ready, free = np.zeros(count * problem.jobs, np.int64), np.zeros(count * problem.stages, np.int64)
    starts = np.empty((n, count), np.int64)
    last = np.full(count * problem.stages, -1)
    saves = problem.saved_times.any()
    row = np.arange(count)
    own, place = (row * problem.jobs + people.T), (row * problem.stages + s.T)
    for i in range(n):
        at, on = own[i], place[i]
        start = np.maximum(ready[at], free[on])
        if saves:
            follows = last[on] + problem.jobs == blocks[:, i]
            start = np.maximum(ready[at], free[on] - np.where(follows, problem.saved_times[last[on]], 0))
            last[on] = blocks[:, i]
        starts[i] = start
        ready[at] = start + lag[i]
        free[on] = start + busy[i]
    by_block = np.empty((count, n), np.int64)
    np.put_along_axis(by_block, blocks, starts.T, 1)
    return ready.reshape(count, -1).max(1), by_block


def _parents(spans: Array, pairs: int, rng: np.random.Generator) -> Array:
    """Return two individuals for each pair, drawn with a probability proportional to 1 / makespan."""
    chance = 1 / spans
    return rng.choice(len(spans), (pairs, 2), p=chance / chance.sum())


def _winners(spans: Array, count: int, rivals: int, rng: np.random.Generator) -> Array:
    """Return the individual with the shortest makespan of each tournament."""
    drawn = rng.integers(len(spans), size=(count, rivals))
    return np.asarray(drawn[np.arange(count), spans[drawn].argmin(1)])


def _crossed(one: Array, two: Array, jobs: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Return two children of each pair.

    The jobs whose genes are kept are a random subset. If there are several jobs, the subset is neither empty nor
    complete.
    """
    stays = rng.random((len(one), jobs)) < 0.5
    stays[np.arange(len(one)), rng.integers(jobs, size=len(one))] = True
    if jobs > 1:
        full = stays.all(1)
        stays[full, rng.integers(jobs, size=int(full.sum()))] = False
    kept_one, kept_two = (np.take_along_axis(stays, each, 1) for each in (one, two))
    return _filled(one, kept_one, two, kept_two), _filled(two, kept_two, one, kept_one)


def _filled(one: Array, kept: npt.NDArray[np.bool_], two: Array, dropped: npt.NDArray[np.bool_]) -> Array:
    child = one.copy()
    child[~kept] = two[~dropped]  # row by row: both sides have the same number of genes
    return child


def _swapped(people: Array, rng: np.random.Generator) -> Array:
    """Return the individuals with two random genes of each swapped."""
    row, n = np.arange(len(people)), people.shape[1]
    a, b = rng.integers(n, size=(2, len(people)))
    people[row, a], people[row, b] = people[row, b], people[row, a]
    return people
