"""Compare the array evaluator with the event loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.papers.umpipe.overlap.lockstep import lockstep
from lightning_pipes.ir import InputError
from lightning_pipes.strategies.umpipe.network import Network, Scheme
from lightning_pipes.strategies.umpipe.overlapped.kernel import NEVER
from lightning_pipes.strategies.umpipe.overlapped.run import Merge, run_overlapped
from tests.strategies.umpipe.overlapped.networks import realistic, simulation

CASES = [
    *((simulation(stages, rows, 7), policy) for stages, rows in ((1, 9), (3, 16), (4, 23)) for policy in Merge),
    (realistic(5, 32, 1), Merge.BACKWARD_FIRST),
]


def by_events(network: Network, genes: np.ndarray, caps: list[int] | None, policy: Merge) -> tuple[list[int], list]:
    makespans, peaks = [], []
    for row in genes.tolist():
        scheme = Scheme(tuple(row[: network.processes]), tuple(row[network.processes :]))
        try:
            run = run_overlapped(network, scheme, caps, policy)
        except InputError:
            makespans.append(NEVER)
            peaks.append(None)
            continue
        makespans.append(run.makespan)
        peaks.append(list(run.peak_rows))
    return makespans, peaks


@pytest.mark.parametrize("capped", [False, True])
def test_a_thousand_individuals_are_those_of_the_event_loop(capped: bool) -> None:
    rng = np.random.default_rng(3)
    stuck = 0
    for network, policy in CASES:
        genes = rng.integers(0, len(network.sizes), (50, 2 * network.processes))
        caps = [int(c) for c in rng.integers(1, network.rows + 1, network.stages)] if capped else None
        found = lockstep(network, genes, caps, policy)
        makespans, peaks = by_events(network, genes, caps, policy)
        assert found.makespans.tolist() == makespans
        for ours, theirs in zip(found.peak_rows.tolist(), peaks, strict=True):
            assert theirs is None or ours == theirs
        stuck += makespans.count(NEVER)
    assert (stuck > 0) == capped
    assert stuck < 450


def test_torch_says_the_same() -> None:
    for network, policy in CASES[::3]:
        genes = np.random.default_rng(1).integers(0, len(network.sizes), (20, 2 * network.processes))
        ours, theirs = (lockstep(network, genes, [9] * network.stages, policy, xp=xp) for xp in (np, torch))
        assert ours.makespans.tolist() == theirs.makespans.tolist()
        assert ours.peak_rows.tolist() == theirs.peak_rows.tolist()


def test_nobody() -> None:
    network = simulation(2, 4, 0)
    found = lockstep(network, np.zeros((0, 6), int))
    assert (found.makespans.shape, found.peak_rows.shape) == ((0,), (0, 2))


@pytest.mark.parametrize(
    ("genes", "said"),
    [
        (np.zeros((1, 5), int), "6 columns"),
        (np.zeros((1, 6)), "whole numbers"),
        (np.full((1, 6), 9), "from 0 to 2"),
    ],
)
def test_mistakes(genes: np.ndarray, said: str) -> None:
    with pytest.raises(InputError, match=said):
        lockstep(simulation(2, 4, 0), genes)
