"""Compare the search with brute force, with CP-SAT and with its own starts."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from benchmarks.papers.umpipe.overlap.lockstep import lockstep
from benchmarks.papers.umpipe.overlap.search import EAGER, Found, search
from lightning_pipes.ir import InputError
from lightning_pipes.strategies.umpipe.network import Network, Scheme
from lightning_pipes.strategies.umpipe.overlapped.kernel import NEVER
from lightning_pipes.strategies.umpipe.overlapped.run import Merge, OverlappedRun, run_overlapped
from tests.strategies.umpipe.overlapped.networks import random_scheme, realistic, simulation


def ran(network: Network, found: Found) -> OverlappedRun:
    return run_overlapped(network, found.scheme, found.caps, found.policy)


def best_of_all(network: Network, caps: list[int] | None, policies: tuple[Merge, ...] = EAGER) -> int:
    """Return the optimum over all schemes, computed with the array evaluator."""
    genes = np.array([*product(range(len(network.sizes)), repeat=2 * network.processes)])
    if caps is not None:
        sizes = np.array(network.sizes)[genes[:, : network.processes : 2]]
        genes = genes[(sizes <= caps).all(axis=1)]
    return min(int(lockstep(network, genes, caps, policy).makespans.min()) for policy in policies)


@pytest.mark.parametrize("seed", range(4))
def test_it_finds_what_brute_force_finds(seed: int) -> None:
    network = simulation(2, 6, seed)
    network = Network(6, network.sizes[:3], network.forward[:, :3], network.backward[:, :3])
    found = search(network, evaluations=5000, seed=seed)
    assert ran(network, found).makespan == found.value <= best_of_all(network, None)
    caps = [4, 6]
    capped = search(network, evaluations=5000, seed=seed, caps=caps)
    assert capped.caps == (4, 6)
    assert ran(network, capped).makespan == capped.value == best_of_all(network, caps)
    assert all(p <= c for p, c in zip(ran(network, capped).peak_rows, caps, strict=True))
    flushed = (Merge.ALL_FORWARDS_FIRST,)
    assert search(network, evaluations=5000, policies=flushed).value == best_of_all(network, None, flushed)


@pytest.mark.parametrize("seed", range(4))
def test_sizes_between_doublings_are_found_too(seed: int) -> None:
    network = simulation(2, 12, seed)
    assert network.sizes == (12, 6, 4, 3, 2, 1)
    assert search(network, evaluations=20_000, seed=seed).value <= best_of_all(network, None)


@pytest.mark.parametrize("seed", range(4))
def test_it_is_no_worse_than_its_starts(seed: int) -> None:
    network = (simulation, realistic)[seed % 2](4, 16, seed)
    starts = [random_scheme(network, n) for n in range(30)]
    reached = [run_overlapped(network, start, policy=policy).makespan for start in starts for policy in EAGER]
    equal = [run_overlapped(network, network.equal_scheme(q)).makespan for q in range(len(network.sizes))]
    hardly = search(network, starts, evaluations=1)
    assert hardly.value <= min(reached + equal)
    found = search(network, starts, evaluations=4000, seed=seed)
    assert found.value <= hardly.value
    assert found.value < hardly.value or seed % 2  # equal chunks may be the best if all stages are equal
    assert found == search(network, starts, evaluations=4000, seed=seed)
    assert 4000 <= found.evaluations < 4200
    assert ran(network, found).makespan == found.value


def test_seconds_are_a_limit_too() -> None:
    assert search(simulation(3, 12, 1), seconds=0.05).value < NEVER


def test_slow_links_take_other_sizes_and_a_longer_warm_up_together() -> None:
    """Check that unequal sizes and a longer warm-up together are better than either of them alone.

    Equal chunks with any warm-up and these sizes with the warm-up of 1F1B are both slower.
    """
    size = np.array([32, 16, 8, 4, 2, 1])
    stage, link = 20 + 20 * size, 60 + 10 * size  # the latency is large compared with the time of a small message
    forward, backward = (np.array([m * stage if k % 2 == 0 else link for k in range(7)]) for m in (1, 2))
    network = Network(32, tuple(size.tolist()), forward, backward)
    equal = min(
        run_overlapped(network, network.equal_scheme(q), policy=policy).makespan for q in range(6) for policy in EAGER
    )
    found = search(network, evaluations=6000)
    run = ran(network, found)
    assert run.makespan < 0.96 * equal
    chunks = network.sizes_of(found.scheme)[0][::2]
    assert len(set(chunks)) > 1
    classic = [(4 - stage) * max(chunks) for stage in range(4)]
    assert run.warmup_rows[0] > classic[0]
    assert run_overlapped(network, found.scheme, classic, found.policy).makespan > 1.04 * run.makespan


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "needs a limit"),
        ({"evaluations": 0}, "evaluations"),
        ({"seconds": -1.0}, "above 0"),
        ({"evaluations": 9, "caps": [1, 3]}, "smallest one has 2 rows"),
        ({"evaluations": 9, "starts": [Scheme((0,), (0,))]}, "an option from 0 to 1"),
    ],
)
def test_mistakes(arguments: dict, said: str) -> None:
    times = np.ones((3, 2), int)
    with pytest.raises(InputError, match=said):
        search(Network(4, (4, 2), times, times), **arguments)
