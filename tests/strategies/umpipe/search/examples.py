"""Small networks with known results, and helpers that enumerate their schemes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from lightning_pipes.strategies.umpipe.network import Network, Scheme, Times
from lightning_pipes.strategies.umpipe.search.chain import Chain


def figure_1() -> Network:
    """Return figure 1 of the paper: two stages and a link, forward only.

    Each process cuts the 4 samples into 1, 2 or 4 micro-batches.
    """
    forward = np.array([[4, 2, 2], [4, 2, 1], [4, 2, 1]])
    return Network(4, (4, 2, 1), forward, np.zeros_like(forward))


def figure_2() -> Network:
    """Return figure 2 of the paper, in which each process cuts the 4 samples into 2 or 4 micro-batches."""
    return Network(4, (2, 1), np.full((3, 2), 2), np.array([[2, 1]] * 3))


def random_network(rng: np.random.Generator, stages: int, rows: int, options: int, most: int = 20) -> Network:
    """Return a network with random chunk sizes, most of which do not divide the batch."""
    sizes = sorted(rng.choice(np.arange(1, rows + 1), min(options, rows), replace=False).tolist(), reverse=True)
    forward, backward = rng.integers(0, most, (2, 2 * stages - 1, len(sizes)))
    return Network(rows, tuple(sizes), forward, backward)


def random_schemes(rng: np.random.Generator, network: Network, count: int) -> list[Scheme]:
    genes = rng.integers(0, len(network.sizes), (count, 2, network.processes)).tolist()
    return [Scheme(tuple(forward), tuple(backward)) for forward, backward in genes]


def every_chain(network: Network) -> list[tuple[int, ...]]:
    """Return all combinations of genes of one direction."""
    return list(product(range(len(network.sizes)), repeat=network.processes))


def by_sample(chain: Chain, genes: Sequence[int]) -> int:
    """Return when the batch has left the chain, by A1: process by process, sample by sample.

    E_kj = max(E_{k-1,z}, E_ky) + F_k, where y is the last sample before j's chunk and z the last one in it. The paper's
    E3 uses the number of micro-batches p_k as their size; the size is ceil(P / p_k).
    """
    sizes, times = chain.sizes.tolist(), chain.times.tolist()
    before = [0] * (chain.rows + 1)
    for k, q in enumerate(genes):
        size, time = sizes[q], times[k][q]
        after = [0] * (chain.rows + 1)
        for j in range(1, chain.rows + 1):
            y = size * ((j - 1) // size)
            z = min(y + size, chain.rows)
            after[j] = max(before[z], after[y]) + time
        before = after
    return before[chain.rows]


def in_loops(chain: Chain, people: Times) -> Times:
    """Return when the batch has left the chain for each row of genes, by A1, in plain Python."""
    return np.array([by_sample(chain, genes) for genes in people.tolist()], np.int64)
