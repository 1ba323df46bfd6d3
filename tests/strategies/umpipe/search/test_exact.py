"""Compare the exact search with enumeration, and check the bounds and gaps that it promises."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_pipes.ir import InputError
from lightning_pipes.strategies.umpipe.network import Network
from lightning_pipes.strategies.umpipe.search import exact
from lightning_pipes.strategies.umpipe.search.chain import chains_of_network, evaluate_genes
from lightning_pipes.strategies.umpipe.search.exact import search_optimum
from lightning_pipes.strategies.umpipe.search.kernel import CHUNK_KERNELS
from tests.strategies.umpipe.search.examples import every_chain, figure_1, figure_2, random_network
from tests.strategies.umpipe.search.greedy import best_equal_scheme, evaluate_schemes
from tests.strategies.umpipe.synthetic_networks import powers_of_two, realistic, simulated


def best_of_all(network: Network) -> int:
    """Return the optimum by enumerating each direction, because the two directions do not wait for each other."""
    people = np.array(every_chain(network))
    return sum(int(evaluate_genes(chain, people).min()) for chain in chains_of_network(network))


def test_against_enumeration() -> None:
    rng = np.random.default_rng(5)
    for case in range(60):
        stages, rows, options = [(1, 9, 9), (2, 12, 8), (3, 10, 4), (4, 16, 3)][case % 4]
        network = random_network(rng, stages, rows, options, most=[5, 100][case % 2])
        found = search_optimum(network)
        assert found.gap == 0
        assert found.value == best_of_all(network) == evaluate_schemes(network, [found.scheme])[0]


def test_one_better_than_the_start_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        exact, "descend_globally", lambda chain, genes: (genes, int(evaluate_genes(chain, genes[None])[0]))
    )
    rng = np.random.default_rng(7)
    by_one = 0
    for _ in range(120):
        network = random_network(rng, 2, 8, 4, most=6)
        best = best_of_all(network)
        assert search_optimum(network).value == best
        by_one += search_optimum(network, seconds=-1.0).value == best + 1
    assert by_one


def test_simulation_networks_against_enumeration() -> None:
    for seed in range(2):
        for stages, rows in ((2, 32), (3, 12), (5, 4)):
            network = simulated(stages, rows, seed).network
            assert search_optimum(network).value == best_of_all(network)


def test_python_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    network = simulated(4, 24, 1).network
    assert CHUNK_KERNELS.load() == "numba"
    found = search_optimum(network)
    monkeypatch.setitem(CHUNK_KERNELS.__dict__, "numba", None)
    assert search_optimum(network) == found


def test_paper_figures() -> None:
    assert search_optimum(figure_1()).value == 7
    assert search_optimum(figure_2()).value == 14


def test_never_worse_than_gpipe_and_between_its_bounds() -> None:
    for seed in range(3):
        network = realistic(6, 64, seed).network
        best = search_optimum(network)
        for seconds, gap in ((0.0, 0.0), (None, 0.05), (None, 1.0)):
            found = search_optimum(network, seconds, gap)
            assert found.lower_bound <= best.value <= found.value <= best_equal_scheme(network).value
            assert found.value == evaluate_schemes(network, [found.scheme])[0]
            assert seconds == 0.0 or found.gap <= gap


def test_gaps() -> None:
    networks = [realistic(8, 64, seed, spread=0.6).network for seed in range(6)]
    found = {gap: [search_optimum(network, gap=gap).gap for network in networks] for gap in (0.002, 0.005, 0.01, 0.02)}
    assert all(max(each) <= gap for gap, each in found.items())
    assert max(found[0.02]) > 0.01  # the search stops early too


@pytest.mark.parametrize(("beams", "suffixes"), [((1,), 0), ((30,), 0), ((1, 1), 2), ((1, 4), 4)])
def test_beams_that_drop_labels_keep_their_promise(
    monkeypatch: pytest.MonkeyPatch, beams: tuple[int, ...], suffixes: int
) -> None:
    """Check the bounds of beams that drop labels, against the proven optimum of the whole search.

    Labels are dropped because there are too few of them, because there is no room for their extensions, or because
    suffixes are merged after the first beam.
    """
    networks = [realistic(8, 64, seed, spread=0.6).network for seed in range(12)]
    networks += [random_network(np.random.default_rng(seed), 4, 16, 3, most=9) for seed in range(12)]
    best = [search_optimum(network) for network in networks]
    assert all(each.gap == 0 for each in best)
    after = 0 if suffixes else len(beams)
    for name, value in {
        "LABELS_PER_KEPT": 1,
        "N_START_SCHEMES": 0,
        "SHARPENING_BEAM": after,
        "MAX_SUFFIXES": suffixes,
    }.items():
        monkeypatch.setattr(exact, name, value)
    found = [search_optimum(network, beams=beams) for network in networks]
    for one, other in zip(best, found, strict=True):
        assert other.lower_bound <= one.value <= other.value
    assert 0 < sum(each.gap == 0 for each in found) < len(found)  # some are proven and some are not


def test_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    networks = [realistic(8, 64, seed, spread=0.6).network for seed in range(12)]
    best = [search_optimum(network) for network in networks]
    monkeypatch.setattr(exact, "MAX_LABEL_INTEGERS", 1)
    monkeypatch.setattr(exact, "SHARPENING_BEAM", len(exact.BEAM_WIDTHS))
    found = [search_optimum(network) for network in networks]
    for one, other in zip(best, found, strict=True):
        assert other.lower_bound <= one.value <= other.value
    assert not all(each.gap == 0 for each in found)


def test_powers_of_two_are_proven() -> None:
    network = realistic(16, 64, 0, powers_of_two(64)).network
    assert search_optimum(network).gap == 0


def test_a_gap_that_is_none() -> None:
    with pytest.raises(InputError, match="gap"):
        search_optimum(figure_2(), gap=-0.1)
