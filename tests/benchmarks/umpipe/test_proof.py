"""Check how close the order of a run is to the best order, and compare CP-SAT with brute force."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import combinations, product

import numpy as np
import pytest

from benchmarks.papers.umpipe.overlap import search as proof
from benchmarks.papers.umpipe.overlap.search import best_merge, search
from lightning_pipes.ir import B, DeadlockError, F, InputError, Program
from lightning_pipes.sim import simulate
from lightning_pipes.strategies.umpipe.network import Network
from lightning_pipes.strategies.umpipe.overlapped.run import OverlappedRun, run_overlapped
from tests.strategies.umpipe.overlapped.chunked import Chunked
from tests.strategies.umpipe.overlapped.networks import random_scheme, realistic, simulation

needs_ortools = pytest.mark.skipif(find_spec("ortools") is None, reason="ortools is not installed")


def of_every_order(run: OverlappedRun) -> int:
    """Return the shortest simulated time of all static programs of two stages."""

    def orders(stage: int) -> list[tuple]:
        forward = [F(stage, span) for span in run.cut.forward[stage]]
        backward = [B(stage, span) for span in run.cut.backward[stage]]
        found = []
        for places in combinations(range(len(forward) + len(backward)), len(forward)):
            rest, first = iter(backward), iter(forward)
            found.append(tuple(next(first) if n in places else next(rest) for n in range(len(forward) + len(backward))))
        return found

    best = run.makespan
    for rows in product(orders(0), orders(1)):
        try:
            timeline = simulate(Program(rows), run.plan(), Chunked(run.network, run.scheme))
        except DeadlockError:
            continue
        best = min(best, timeline.makespan)
    return best


@needs_ortools
@pytest.mark.parametrize("seed", range(4))
def test_it_is_the_best_of_all_orders(seed: int) -> None:
    network = simulation(2, 4, seed)
    network = Network(4, network.sizes[1:], network.forward[:, 1:], network.backward[:, 1:])
    run = run_overlapped(network, random_scheme(network, seed))
    merged = best_merge(run, 5)
    assert merged.value == merged.lower_bound == of_every_order(run)


@needs_ortools
def test_no_order_is_much_better_than_to_start_what_is_ready() -> None:
    """Check that the best order is at most half a percent faster on average, for the schemes that a search returns."""
    gaps = []
    for seed in range(6):
        network = realistic(3, 8, seed) if seed % 2 else simulation(3, 8, seed)
        found = search(network, evaluations=3000)
        merged = best_merge(run_overlapped(network, found.scheme, found.caps, found.policy), 20)
        assert merged.value == merged.lower_bound <= found.value
        gaps.append(found.value / merged.value - 1)
    assert np.mean(gaps) < 0.005
    assert max(gaps) < 0.02


def test_without_ortools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "find_spec", lambda name: None)
    network = simulation(1, 2, 0)
    with pytest.raises(InputError, match="needs OR-Tools"):
        best_merge(run_overlapped(network, network.equal_scheme(0)), 1)
