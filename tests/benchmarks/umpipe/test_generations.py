"""Compare expected generations with random draws, and hits with the contents of a population."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from benchmarks.papers.umpipe.evaluators import best_by_trying
from benchmarks.papers.umpipe.networks import simulated
from benchmarks.papers.umpipe.search import expected_generations, first_hit
from lightning_pipes.strategies.umpipe.search import SchemeEvolution, evolve_schemes


def test_expected_generations_are_those_of_draws_at_random():
    """Compare the mean over random draws with the expected number of generations.

    With one chromosome they agree. With two, the expected number is at least the mean of the one that is found last.
    """
    rng, options, stages, population = np.random.default_rng(0), 2, 2, 4
    genes = 2 * stages - 1
    waits = []
    for _ in range(2000):
        draws = rng.integers(0, options, (400, 2, genes)).max(axis=2) == 0  # each direction has one best scheme
        waits.append([draws.all(axis=1).argmax() + 1, (draws.argmax(axis=0) + 1).max()])
    one, two = np.mean(waits, axis=0) / population
    assert expected_generations(options, stages, "TiGAP", population) == pytest.approx(one, rel=0.06)
    assert two <= expected_generations(options, stages, "TiDGAP", population) <= 2 * two


def test_a_hit_is_a_generation_that_has_the_optimum():
    network = simulated(2, 8, seed=3).network
    best = best_by_trying(network)
    for generations, method in product((1, 30), ("TiDGAP", "TiGAP")):
        run = evolve_schemes(network, method, 3, SchemeEvolution(20, generations, start="random"))
        hit = first_hit(run, best)
        assert np.isfinite(hit) == (run.best.value == best)
        if np.isfinite(hit):
            until = SchemeEvolution(20, max(1, int(hit)), start="random")
            assert evolve_schemes(network, method, 3, until).best.value == best
            assert (
                hit <= 1
                or evolve_schemes(network, method, 3, SchemeEvolution(20, int(hit) - 1, start="random")).best.value
                > best
            )
    assert np.isfinite(hit), "one of them finds it"
