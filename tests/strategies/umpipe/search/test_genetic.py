"""Check that the paper's genetic algorithms differ only in the ways that the paper describes."""

from __future__ import annotations

import pytest

from lightning_pipes.ir import InputError
from lightning_pipes.strategies.umpipe.search.exact import search_optimum
from lightning_pipes.strategies.umpipe.search.genetic import CHROMOSOMES, SchemeEvolution, evolve_schemes
from tests.strategies.umpipe.search.examples import in_loops
from tests.strategies.umpipe.search.greedy import best_equal_scheme, evaluate_schemes
from tests.strategies.umpipe.synthetic_networks import realistic, simulated

SHORT = SchemeEvolution(population=12, generations=8, mutation=0.1)


@pytest.mark.parametrize("method", ["GAP", "DGAP"])
def test_evaluators_do_not_change_what_evolves(method: str) -> None:
    network = simulated(3, 12, 1).network
    found = evolve_schemes(network, method, 7, SHORT, in_loops)
    assert found == evolve_schemes(network, method, 7, SHORT)
    assert evolve_schemes(network, method, 8, SHORT) != found


def test_one_chromosome_or_two() -> None:
    network = simulated(3, 12, 1).network
    assert evolve_schemes(network, "TiGAP", 7, SHORT).history != evolve_schemes(network, "TiDGAP", 7, SHORT).history


@pytest.mark.parametrize("method", CHROMOSOMES)
def test_starts_at_gpipes_best_and_never_gets_worse(method: str) -> None:
    network = realistic(3, 16, 2).network
    found = evolve_schemes(network, method, settings=SHORT)
    assert found.history[0] <= best_equal_scheme(network).value
    assert list(found.history) == sorted(found.history, reverse=True)
    assert found.history[-1] == found.best.value == evaluate_schemes(network, [found.best.scheme])[0]
    assert found.recombined.value == evaluate_schemes(network, [found.recombined.scheme])[0] <= found.best.value


def test_every_count_is_an_option_of_its_own() -> None:
    """Check a simulation network whose tables have more columns than chunk sizes.

    Several columns then have the same chunks, and each is an option for the search.
    """
    tables = simulated(3, 12, 1)
    found = evolve_schemes(tables, settings=SHORT)
    assert len(tables.sizes) == 12 > len(tables.network.sizes)
    assert search_optimum(tables.network).value <= found.best.value == evaluate_schemes(tables, [found.best.scheme])[0]


def test_finds_the_optimum_of_a_small_network() -> None:
    network = simulated(2, 8, 3).network
    assert evolve_schemes(network, settings=SchemeEvolution(start="random")).best.value == search_optimum(network).value


def test_mistakes() -> None:
    with pytest.raises(InputError, match="there are GAP, DGAP"):
        evolve_schemes(simulated(2, 4).network, "TGAP")
    with pytest.raises(InputError, match="start must be"):
        SchemeEvolution(start="gpipe")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="mutation must be a share"):
        SchemeEvolution(mutation=2)
