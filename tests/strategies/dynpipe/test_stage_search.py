"""Compare Algorithm 1 with a search through all pipelines."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product

import pytest

from lightning_pipes.cost import Cluster, Link
from lightning_pipes.ir import InputError
from lightning_pipes.planning.staleness import Iterations
from lightning_pipes.strategies.dynpipe.meshes import DeviceMesh, Pricing, list_meshes
from lightning_pipes.strategies.dynpipe.stage_search import (
    Pipeline,
    StageChoice,
    StageOption,
    choose_stages,
    paper_seconds,
    true_seconds,
)
from tests.cases import for_each
from tests.strategies.dynpipe.iteration_bound import least_seconds
from tests.strategies.dynpipe.neighbourhood import layered_model

SECONDS = (1.0, 2.0, 0.5, 1.5, 3.0, 1.0)


def pricing(hosts: int = 2, each: int = 2, slow: float = 1e5, memory: int | None = None) -> Pricing:
    cluster = Cluster.from_counts(hosts, each, memory, Link(bandwidth=1e7), Link(bandwidth=slow))
    return Pricing(layered_model([1e-3 * t for t in SECONDS]), cluster, rows=4)


def everything(of: Pricing, n: int, judge: Callable[[list[Pipeline]], list[float]]) -> float:
    """Return the smallest time over all assignments of layers and devices to stages."""
    devices, layers = len(of.cluster.devices), len(of.profile.layers)
    found: list[Pipeline] = []
    machine = of.machine_of_device
    shapes = [m for size in range(1, devices + 1) for m in list_meshes(size) if m.data <= of.rows]
    for chosen in product(shapes, repeat=n):
        if sum(m.size for m in chosen) != devices:
            continue
        starts = [sum(m.size for m in chosen[:s]) for s in range(n)]
        if any(machine[a] != machine[a + m.size - 1] for a, m in zip(starts, chosen, strict=True)):
            continue
        for inner in combinations(range(1, layers), n - 1):
            cuts = (0, *inner, layers)
            p = [float(of.stage_seconds(m)[cuts[s], cuts[s + 1]]) for s, m in enumerate(chosen)]
            c = [
                of.transfer_seconds(
                    cuts[s + 1], chosen[s], chosen[s + 1], machine[starts[s + 1] - 1] != machine[starts[s + 1]]
                )
                for s in range(n - 1)
            ]
            sizes = [
                float(of.bytes(m, n - s)[cuts[s], cuts[s + 1]]) if of.memory_limit is not None else 0.0
                for s, m in enumerate(chosen)
            ]
            if of.memory_limit is not None and max(sizes) > of.memory_limit:
                continue
            found.append((p, c))
    if not found:
        return math.inf
    return min(judge(found))


def by_paper(every: list[Pipeline]) -> list[float]:
    return [paper_seconds(*each) for each in every]


def by_bound(every: list[Pipeline]) -> list[float]:
    return [least_seconds(*each) for each in every]


@for_each("n", [1, 2, 3, 4])
@for_each("slow", [1e4, 1e6])
def test_it_finds_what_a_search_through_everything_finds(n: int, slow: float) -> None:
    """Compare both modes of the search with the search through all pipelines.

    The paper's recursion minimizes its own formula, in which an additional stage never helps the earlier stages. The
    default mode selects the best assignments by a lower bound and simulates them.
    """
    of = pricing(slow=slow)
    ours = choose_stages(of, stages=[n]).options[0]
    papers = choose_stages(of, stages=[n], mode="paper").options[0]
    exact, formula = everything(of, n, true_seconds), everything(of, n, by_paper)
    if ours.best is None:
        assert exact == math.inf
        return
    assert papers.best is not None
    assert exact <= ours.best.iteration * (1 + 1e-9)
    assert ours.best.iteration <= 1.02 * exact
    assert papers.best.iteration == pytest.approx(formula)


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("slow", [1e4, 1e6])
def test_the_first_that_is_simulated_has_the_lowest_bound(n: int, slow: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_pipes.strategies.dynpipe.stage_search.MAX_SIMULATED_ASSIGNMENTS", 1)
    of = pricing(slow=slow)
    best = choose_stages(of, stages=[n]).options[0].best
    if best is not None:
        assert least_seconds(best.stages, best.transfers) == pytest.approx(everything(of, n, by_bound))


def test_memory_leaves_fewer_stages() -> None:
    """Check the number of layers in a stage if memory is short.

    A layer has 4 MB, and 1 MB more for each weight version. The first of S stages keeps S versions.
    """
    layer, version = 4 * 10**6, 10**6
    tight = pricing(1, 4, memory=layer + 2 * version + 10**5)
    found = choose_stages(tight, stages=[4]).options[0]
    assert found.best is None or max(span.rows for span in found.best.layers) * layer < 2 * layer
    assert everything(tight, 4, true_seconds) == (
        math.inf if found.best is None else pytest.approx(found.best.iteration)
    )
    roomy = pricing(1, 4, memory=20 * layer)
    assert choose_stages(roomy, stages=[4]).options[0].best is not None
    assert (pricing().bytes(DeviceMesh(1, 1), 3) - pricing().bytes(DeviceMesh(1, 1), 1))[0, 1] == pytest.approx(
        2e6 + 2 * 4e3
    )
    cached = replace(pricing(), cached=True)
    assert (cached.bytes(DeviceMesh(1, 1), 3) - cached.bytes(DeviceMesh(1, 1), 2))[0, 1] == pytest.approx(4e3)


def test_the_number_of_stages_weighs_staleness_against_speed() -> None:
    of = pricing(1, 4)
    free, stale = Iterations(1000.0, 0.0), Iterations(1000.0, 0.03)
    fast = choose_stages(of, free, scan_all=True, executable=True)
    found = choose_stages(of, stale, scan_all=True, executable=True)
    assert (fast.best.n_stages, found.best.n_stages) == (4, 2)
    two, four = fast.options[1], found.options[3]
    assert two.best is not None
    assert found.best.seconds == pytest.approx(1000.0 / (1 - 0.03 * 8) * two.best.iteration)
    assert (four.best, four.seconds) == (None, math.inf)
    assert "never reaches the target" in four.why_not
    assert "never" in str(found)
    with pytest.raises(InputError, match="no number of stages"):
        _ = choose_stages(of, Iterations(1.0, 2.0)).best


def test_it_stops_after_two_rises() -> None:
    of = Pricing(layered_model([1e-3] * 8), Cluster.from_counts(1, 8, None, Link(bandwidth=1e9)), rows=8)

    def rising(stages: int) -> float:
        return 10.0**stages

    assert len(choose_stages(of, rising).options) == 3
    assert len(choose_stages(of, rising, scan_all=True).options) == 8


def test_what_can_run_is_said() -> None:
    of = pricing(1, 4)
    found = choose_stages(of, stages=[2], executable=True).options[0]
    assert found.best is not None
    assert (found.best.is_executable, found.best.data_parallel) == (True, [3, 1]), "the last two layers take 2/3"
    even = replace(found.best, meshes=(DeviceMesh(2, 1), DeviceMesh(2, 1)))
    assert (even.is_executable, even.data_parallel) == (True, 2)
    three = choose_stages(of, stages=[3], executable=True)
    assert three.best.best is not None
    assert three.best.best.is_executable
    assert sorted(three.best.best.data_parallel) == [1, 1, 2]  # type: ignore[arg-type]
    shards = replace(three.best.best, meshes=(DeviceMesh(1, 2), DeviceMesh(1, 1), DeviceMesh(1, 1)))
    assert not shards.is_executable
    assert "only planned: shards that differ between stages" in str(StageChoice((StageOption(3, 1.0, shards),)))
    alike = replace(even, meshes=(DeviceMesh(1, 2), DeviceMesh(1, 2)))
    assert (alike.is_executable, alike.data_parallel, alike.tensor_parallel) == (True, 1, 2)
    with pytest.raises(InputError, match="'simulated' or 'paper'"):
        choose_stages(of, mode="guess")  # type: ignore[arg-type]


def test_shards_and_replicas_cost_what_the_formulas_say() -> None:
    """Check the costs of shards and replicas by equation E6.

    Each device has a part of the work. The time of the all-gather grows with the number of shards, and only replicas
    need an all-reduce.
    """
    of = pricing()
    alone, shards, replicas = (of.stage_seconds(DeviceMesh(*m))[0, 6] for m in ((1, 1), (1, 2), (2, 1)))
    assert alone == pytest.approx(sum(SECONDS) * 3e-3 * 4)
    gathered = 2 * (1 / 2) * 6 * 1e3 * 4 / 1e7
    assert shards == pytest.approx(alone / 2 + gathered)
    assert replicas == pytest.approx(alone / 2 + 2 * 1 * (6e6 / 2 / 1e7))
    assert of.transfer_seconds(1, DeviceMesh(2, 1), DeviceMesh(1, 2), across=False) == pytest.approx(
        2 * 4e3 / (4 * 1e7)
    )
    one_card = replace(of, shared=True)
    assert one_card.transfer_seconds(1, DeviceMesh(2, 1), DeviceMesh(1, 2), across=True) == pytest.approx(
        2 * 4e3 / (2 * 1e5)
    )
