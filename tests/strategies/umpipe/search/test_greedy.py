"""Compare equal schemes and the two greedy methods with definitions that evaluate every candidate from the start."""

from __future__ import annotations

import numpy as np

from lightning_pipes.strategies.umpipe.search.chain import Chain, chains_of_network
from tests.strategies.umpipe.search.examples import by_sample, figure_1, random_network, random_schemes
from tests.strategies.umpipe.search.greedy import (
    best_equal_scheme,
    equal_scheme,
    evaluate_schemes,
    global_greedy,
    local_greedy,
)


def local(chain: Chain) -> tuple[int, ...]:
    """Return the result of algorithm A5, written as in the paper."""
    genes: list[int] = []
    for _ in range(chain.processes):
        genes.append(min(range(chain.options), key=lambda q: by_sample(chain, [*genes, q])))
    return tuple(genes)


def descended(chain: Chain, start: tuple[int, ...], rounds: int) -> tuple[int, ...]:
    """Return the result of algorithm A6, written as in the paper."""
    genes = list(start)
    for _ in range(rounds):
        for k in range(chain.processes):
            options = sorted(range(chain.options), key=lambda q: q != genes[k])  # the current option wins ties
            genes[k] = min(options, key=lambda q: by_sample(chain, [*genes[:k], q, *genes[k + 1 :]]))
    return tuple(genes)


def test_against_the_words_of_the_paper() -> None:
    rng = np.random.default_rng(8)
    for stages, rows in ((1, 6), (2, 9), (3, 16), (4, 13)):
        network = random_network(rng, stages, rows, 5, most=30)
        found = local_greedy(network)
        assert found.scheme == tuple(local(chain) for chain in chains_of_network(network))
        assert found.value == evaluate_schemes(network, [found.scheme])[0]
        for start, rounds in [(equal_scheme(network, 2), 2), *((each, 1) for each in random_schemes(rng, network, 3))]:
            found = global_greedy(network, start, rounds)
            expected = tuple(descended(c, g, rounds) for c, g in zip(chains_of_network(network), start, strict=True))
            assert found.scheme == expected
            assert found.value == evaluate_schemes(network, [found.scheme])[0]


def test_gpipe() -> None:
    rng = np.random.default_rng(9)
    network = random_network(rng, 3, 20, 6)
    values = evaluate_schemes(network, [equal_scheme(network, q) for q in range(6)])
    found = best_equal_scheme(network)
    assert found.value == values.min()
    assert found.scheme == equal_scheme(network, int(values.argmin()))
    assert global_greedy(network).value <= found.value


def test_paper_figure_1() -> None:
    """Check both greedy methods on figure 1.

    The whole batch leaves the first stage earliest in one piece, and cutting it later gains nothing. From GPipe's best
    scheme, no change of a single process helps, although the scheme (2, 4, 4) takes 7.
    """
    found = local_greedy(figure_1())
    assert (found.scheme.forward, found.value) == ((0, 0, 0), 12)
    assert global_greedy(figure_1()).value == 8
    assert global_greedy(figure_1(), equal_scheme(figure_1(), 2)).value == 7
