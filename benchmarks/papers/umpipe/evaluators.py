"""The paper's evaluator of a chain of processes, sample by sample (A1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_pipes.strategies.umpipe.network import Times
from lightning_pipes.strategies.umpipe.search.chain import Chain


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
