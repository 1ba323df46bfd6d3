"""Compare the search with brute force and with its own starts."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from benchmarks.papers.umpipe.overlapped import EAGER, Found, equal, search
from lightning_pipes.ir import InputError
from lightning_pipes.strategies.umpipe.network import Network, Scheme
from tests.strategies.umpipe.overlapped.networks import random_scheme, realistic, simulation
from tests.strategies.umpipe.overlapped.runs import OverlappedRun, run_overlapped, sizes_of_scheme
from tests.strategies.umpipe.search.greedy import equal_scheme


def ran(network: Network, found: Found) -> OverlappedRun:
    return run_overlapped(network, found.scheme, found.caps, found.policy)


def best_of_all(network: Network) -> int:
    """Return the optimum over all schemes, without caps."""
    every = product(range(len(network.sizes)), repeat=network.processes)
    schemes = [Scheme(*both) for both in product(list(every), repeat=2)]
    return min(run_overlapped(network, scheme, policy=policy).makespan for scheme in schemes for policy in EAGER)


@pytest.mark.parametrize("seed", range(4))
def test_it_finds_what_brute_force_finds(seed: int) -> None:
    network = simulation(2, 6, seed)
    network = Network(6, network.sizes[:3], network.forward[:, :3], network.backward[:, :3])
    found = search(network, evaluations=5000, seed=seed)
    assert ran(network, found).makespan == found.value <= best_of_all(network)


def test_sizes_between_doublings_are_found_too() -> None:
    network = simulation(2, 12, 2)
    network = Network(12, network.sizes[:3], network.forward[:, :3], network.backward[:, :3])
    assert network.sizes == (12, 6, 4)
    doublings = Network(12, (12, 6), network.forward[:, :2], network.backward[:, :2])
    assert search(network, evaluations=20_000).value <= best_of_all(network) < best_of_all(doublings)


@pytest.mark.parametrize("seed", range(4))
def test_it_is_not_worse_than_its_starts(seed: int) -> None:
    network = (simulation, realistic)[seed % 2](4, 16, seed)
    starts = [random_scheme(network, n) for n in range(30)]
    reached = [run_overlapped(network, start, policy=policy).makespan for start in starts for policy in EAGER]
    schemes = [equal_scheme(network, q) for q in range(len(network.sizes))]
    even = min(run_overlapped(network, scheme, policy=policy).makespan for scheme in schemes for policy in EAGER)
    assert equal(network) == even
    hardly = search(network, starts, evaluations=1)
    assert hardly.value <= min([*reached, even])
    found = search(network, starts, evaluations=4000, seed=seed)
    assert found.value <= hardly.value
    assert found.value < hardly.value or seed % 2  # equal chunks may be the best if all stages are equal
    assert found == search(network, starts, evaluations=4000, seed=seed)
    assert 4000 <= found.evaluations < 4200
    assert ran(network, found).makespan == found.value


def test_slow_links_take_other_sizes_and_a_longer_warm_up_together() -> None:
    """Check that unequal sizes and a longer warm-up together are better than either of them alone.

    Equal chunks with any warm-up and these sizes with the warm-up of 1F1B are both slower.
    """
    size = np.array([32, 16, 8, 4, 2, 1])
    stage, link = 20 + 20 * size, 60 + 10 * size  # the latency is large compared with the time of a small message
    forward, backward = (np.array([m * stage if k % 2 == 0 else link for k in range(7)]) for m in (1, 2))
    network = Network(32, tuple(size.tolist()), forward, backward)
    found = search(network, evaluations=6000)
    run = ran(network, found)
    assert run.makespan < 0.96 * equal(network)
    chunks = sizes_of_scheme(network, found.scheme)[0][::2]
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
        ({"evaluations": 9, "starts": [Scheme((0,), (0,))]}, "an option from 0 to 1"),
    ],
)
def test_mistakes(arguments: dict, said: str) -> None:
    times = np.ones((3, 2), int)
    with pytest.raises(InputError, match=said):
        search(Network(4, (4, 2), times, times), **arguments)
