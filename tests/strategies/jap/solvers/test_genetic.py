"""Check each operator of the genetic algorithm."""

import numpy as np
import pytest

from lightning_pipes.strategies.jap import Effort
from lightning_pipes.strategies.jap.solvers.genetic import (
    OrderEvolution,
    _crossed,
    _filled,
    _parents,
    _swapped,
    _winners,
    decode_genes,
    evolve_orders,
)
from lightning_pipes.strategies.jap.solvers.rules import PRIORITY_RULES, order_by_rule
from tests.strategies.jap.by_hand import random_problem
from tests.strategies.jap.random_arrays import random_array


def test_genes_are_blocks_in_the_order_of_their_jobs():
    """Compare every decoded chromosome with a decoder that processes one gene at a time."""
    problem = random_problem(4, 3, 3)
    rng = np.random.default_rng(0)
    people = rng.permuted(np.tile(np.repeat(np.arange(3), 6), (20, 1)), axis=1)
    spans, starts = decode_genes(problem, people)
    for genes, span, begun in zip(people, spans, starts, strict=True):
        step, ready, free, last = [0] * 3, [0] * 3, [0] * 3, [None] * 3
        for j in genes.tolist():
            k = step[j]
            s = k if k < 3 else 5 - k
            block = 6 * s + j + (0 if k < 3 else 3)
            t = max(ready[j], free[s] - (problem.switch[j, s] if last[s] == j else 0))
            assert begun[block] == t
            last[s] = j
            ready[j], free[s], step[j] = t + problem.block_lags[block], t + problem.busy_times[block], k + 1
        assert span == max(ready)
        problem.check(begun)


def test_crossover_keeps_the_places_of_some_jobs_and_the_order_of_the_others():
    one, two = np.array([[0, 1, 2, 0, 2, 1]]), np.array([[2, 2, 1, 0, 1, 0]])
    assert _filled(one, one == 0, two, two == 0).tolist() == [[0, 2, 2, 0, 1, 1]]
    assert _filled(two, two != 1, one, one != 1).tolist() == two.tolist()
    rng = np.random.default_rng(1)
    one, two = (rng.permuted(np.tile(np.repeat(np.arange(4), 6), (30, 1)), axis=1) for _ in range(2))
    children = np.concatenate(_crossed(one, two, 4, rng))
    assert (np.sort(children, axis=1) == np.sort(one[0])).all()
    # some children equal a parent because only one job keeps its places
    assert (children != np.concatenate([one, two])).any(1).mean() > 0.5


def test_parents_and_survivors_are_drawn_by_their_makespans():
    """Check the roulette wheel with weights 1 / makespan, and the tournament of three.

    In a tournament, each of the three competitors is drawn from all four with replacement.
    """
    rng = np.random.default_rng(0)
    spans = np.array([1, 2, 4, 4])
    drawn = np.bincount(_parents(spans, 20_000, rng).reshape(-1), minlength=4) / 40_000
    assert drawn == pytest.approx([4 / 8, 2 / 8, 1 / 8, 1 / 8], abs=0.01)
    won = np.bincount(_winners(np.array([3, 9, 1, 5]), 40_000, 3, rng), minlength=4) / 40_000
    # the share of tournaments in which all three are the best, the second best or worse, and so on
    at_least = [(n / 4) ** 3 for n in (4, 3, 2, 1, 0)]
    assert won[[2, 0, 3, 1]] == pytest.approx(-np.diff(at_least), abs=0.01)


def test_mutation_exchanges_two_genes():
    rng = np.random.default_rng(0)
    people = rng.permuted(np.tile(np.repeat(np.arange(4), 6), (200, 1)), axis=1)
    mutants = _swapped(people.copy(), rng)
    assert (np.sort(mutants, axis=1) == np.sort(people[0])).all()
    changed = (mutants != people).sum(1)
    assert set(changed.tolist()) == {0, 2}
    assert (changed == 2).mean() == pytest.approx(18 / 24, abs=0.1)  # exchanging two genes of one job changes nothing


@pytest.mark.parametrize("seed", range(3))
def test_evolution_keeps_the_best(seed):
    problem = random_array(5, 3, seed=1)
    spans = [evolve_orders(problem, Effort(10**6), seed, OrderEvolution(20, generations=g)).makespan for g in range(15)]
    assert spans == sorted(spans, reverse=True)
    assert spans[0] > spans[-1]


def test_a_seeded_population_begins_with_the_rules():
    problem = random_array(16, 4)
    best = min(order_by_rule(problem, rule).makespan for rule in PRIORITY_RULES)
    seeded = evolve_orders(problem, Effort(100), settings=OrderEvolution(seeded=True))
    assert seeded.makespan <= best < evolve_orders(problem, Effort(100)).makespan
    problem.check(seeded.starts)
