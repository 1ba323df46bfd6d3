"""The paper's genetic algorithms differ in what they say they do, and in nothing else."""

from __future__ import annotations

import pytest

from benchmarks.papers.umpipe.networks import realistic, simulated
from lightning_pipes.ir import InputError
from lightning_pipes.strategies.umpipe.search.evaluate import ended, evaluated
from lightning_pipes.strategies.umpipe.search.exact import optimal
from lightning_pipes.strategies.umpipe.search.genetic import METHODS, Genetic, evolved
from lightning_pipes.strategies.umpipe.search.greedy import gpipe

SHORT = Genetic(population=12, generations=8, mutation=0.1)


@pytest.mark.parametrize("methods", [("DGAP", "OiDGAP", "TiDGAP"), ("GAP", "TiGAP")])
def test_evaluators_do_not_change_what_evolves(methods: tuple[str, ...]) -> None:
    network = simulated(3, 12, 1).network
    found = [evolved(network, method, 7, SHORT) for method in methods]
    found.append(evolved(network, methods[0], 7, SHORT, ended))
    assert all(each == found[0] for each in found)
    assert evolved(network, methods[0], 8, SHORT, ended) != found[0]


def test_one_chromosome_or_two() -> None:
    network = simulated(3, 12, 1).network
    assert evolved(network, "TiGAP", 7, SHORT).history != evolved(network, "TiDGAP", 7, SHORT).history


@pytest.mark.parametrize("method", METHODS)
def test_starts_at_gpipes_best_and_never_gets_worse(method: str) -> None:
    network = realistic(3, 16, 2).network
    found = evolved(network, method, settings=SHORT, evaluator=ended)
    assert found.history[0] <= gpipe(network).value
    assert list(found.history) == sorted(found.history, reverse=True)
    assert found.history[-1] == found.best.value == evaluated(network, [found.best.scheme])[0]
    assert found.recombined.value == evaluated(network, [found.recombined.scheme])[0] <= found.best.value


def test_every_count_is_an_option_of_its_own() -> None:
    """The tables of a simulation network have more columns than its sizes, and the same chunks."""
    tables = simulated(3, 12, 1)
    found = evolved(tables, settings=SHORT)
    assert len(tables.sizes) == 12 > len(tables.network.sizes)
    assert optimal(tables.network).value <= found.best.value == evaluated(tables, [found.best.scheme])[0]


def test_finds_the_optimum_of_a_small_network() -> None:
    network = simulated(2, 8, 3).network
    assert evolved(network, settings=Genetic(start="random"), evaluator=ended).best.value == optimal(network).value


def test_mistakes() -> None:
    with pytest.raises(InputError, match="there are GAP, DGAP"):
        evolved(simulated(2, 4).network, "TGAP")
    with pytest.raises(InputError, match="start must be"):
        Genetic(start="gpipe")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="mutation must be a share"):
        Genetic(mutation=2)
