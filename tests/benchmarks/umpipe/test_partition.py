"""Compare the joint search for cuts and sizes with brute force over both."""

from __future__ import annotations

from itertools import combinations, pairwise, product

import numpy as np
import pytest

from benchmarks.papers.umpipe.overlap.lockstep import lockstep
from benchmarks.papers.umpipe.overlap.partition import Layers, joint
from benchmarks.papers.umpipe.overlap.search import EAGER, search
from lightning_pipes.ir import InputError
from lightning_pipes.strategies.umpipe.overlapped.run import run_overlapped


def random_layers(
    count: int, seed: int, sizes: tuple[int, ...] = (8, 4, 2), overhead: tuple[int, int] = (0, 0)
) -> Layers:
    rng = np.random.default_rng(seed)

    def times(rows: int, scale: int) -> np.ndarray:
        slope, floor = rng.integers(1, 8, (2, rows))
        return scale * np.stack([np.maximum(slope * size, 4 * floor) for size in sizes], axis=1)

    return Layers(8, sizes, times(count, 1), times(count, 2), times(count - 1, 1), times(count - 1, 1), overhead)


def test_the_network_of_some_cuts() -> None:
    layers = random_layers(5, 0, overhead=(3, 7))
    network = layers.network((2, 3))
    assert network.stages == 3
    for q in range(3):
        forward, backward = network.forward[:, q].tolist(), network.backward[:, q].tolist()
        for i, (a, b) in enumerate(pairwise((0, 2, 3, 5))):
            assert forward[2 * i] == sum(int(layers.forward[n, q]) for n in range(a, b)) + 3
            assert backward[4 - 2 * i] == sum(int(layers.backward[n, q]) for n in range(a, b)) + 7
        assert forward[1::2] == [layers.forward_links[1, q], layers.forward_links[2, q]]
        assert backward[1::2] == [layers.backward_links[2, q], layers.backward_links[1, q]]


@pytest.mark.parametrize("seed", range(4))
def test_even_cuts_are_the_most_even_ones(seed: int) -> None:
    layers = random_layers(7, seed)
    times, counts = layers.forward + layers.backward, [8 // size for size in layers.sizes]
    work = [min(t * n for t, n in zip(row, counts, strict=True)) for row in times.tolist()]

    def busiest(cuts: tuple[int, ...]) -> int:
        return max(sum(work[a:b]) for a, b in pairwise((0, *cuts, 7)))

    for stages in range(1, 8):
        best = min(busiest(cuts) for cuts in combinations(range(1, 7), stages - 1))
        assert busiest(layers.even_cuts(stages)) == best


@pytest.mark.parametrize("seed", range(3))
def test_it_finds_what_brute_force_over_cuts_and_schemes_finds(seed: int) -> None:
    layers = random_layers(5, seed, sizes=(8, 4, 2))
    genes = np.array([*product(range(3), repeat=6)])
    best = min(
        int(lockstep(layers.network((cut,)), genes, policy=policy).makespans.min())
        for cut in range(1, 5)
        for policy in EAGER
    )
    found = joint(layers, 2, evaluations=3000, seed=seed)
    assert found.found.value <= best
    run = run_overlapped(layers.network(found.cuts), found.found.scheme, found.found.caps, found.found.policy)
    assert run.makespan == found.found.value
    assert found.network.forward.tolist() == layers.network(found.cuts).forward.tolist()


@pytest.mark.parametrize("seed", range(3))
def test_it_is_within_a_percent_of_a_search_at_every_cut(seed: int) -> None:
    layers = random_layers(7, 10 + seed)
    every = combinations(range(1, 7), 2)
    best = min(search(layers.network(cuts), evaluations=1500, seed=seed).value for cuts in every)
    found = joint(layers, 3, evaluations=6000, seed=seed)
    assert found.found.value <= 1.01 * best
    again = joint(layers, 3, evaluations=6000, seed=seed)
    assert (found.cuts, found.found) == (again.cuts, again.found)
    even = search(layers.network(layers.even_cuts(3)), evaluations=1500, seed=seed).value
    assert found.found.value <= even


def test_mistakes() -> None:
    layers = random_layers(4, 0)
    for cuts in ((0,), (4,), (2, 2), (3, 1)):
        with pytest.raises(InputError, match="cuts must rise from 1 to at most 3"):
            layers.network(cuts)
    with pytest.raises(InputError, match="1 to 4 stages"):
        joint(layers, 5, evaluations=1)
    with pytest.raises(InputError, match="backward_links needs 3 rows"):
        Layers(8, layers.sizes, layers.forward, layers.backward, layers.forward_links, layers.forward)
