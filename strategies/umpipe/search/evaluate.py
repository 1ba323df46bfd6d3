"""The time that schemes take: the paper's recurrence, which is the definition, and compiled over chunks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_pipes.ir import InputError, short_repr
from lightning_pipes.strategies.umpipe.network import Scheme, Times
from lightning_pipes.strategies.umpipe.search.chain import Chain, Cuts, chains
from lightning_pipes.strategies.umpipe.search.kernel import CHUNKS


def evaluated(network: Cuts, schemes: Sequence[Scheme]) -> Times:
    """The time that a batch takes with each scheme, all forwards before all backwards (E4), in the network's unit.

    Raises:
        InputError: a scheme that does not name an option for each process.
    """
    return sum(
        (ended(chain, genes) for chain, genes in zip(chains(network), people_of(network, schemes), strict=True)),
        start=np.zeros(len(schemes), np.int64),
    )


def people_of(network: Cuts, schemes: Sequence[Scheme]) -> tuple[Times, Times]:
    """The genes of schemes, a row each: forward, and backward.

    Raises:
        InputError: a scheme that does not name an option for each process.
    """
    shape = (len(schemes), len(network.forward))
    for number, scheme in enumerate(schemes):
        for name, genes in zip(Scheme._fields, scheme, strict=True):
            if len(genes) != shape[1] or not all(0 <= q < len(network.sizes) for q in genes):
                raise InputError(
                    f"{name} of scheme {number} needs an option from 0 to {len(network.sizes) - 1} for each of "
                    f"{shape[1]} processes, got {short_repr(genes)}"
                )
    forward, backward = (np.array([scheme[i] for scheme in schemes], np.int64).reshape(shape) for i in (0, 1))
    return forward, backward


def ended(chain: Chain, people: Times) -> Times:
    """When the batch has left the chain, for each row of genes; `kernel.ended` in a row."""
    counts = chain.counts
    run = CHUNKS.select(int(counts[people].sum()) if len(people) else 0).run
    ends = np.zeros(len(people), np.int64)
    most = int(counts.max())
    run.ended_all(
        chain.rows,
        chain.sizes,
        chain.times,
        np.ascontiguousarray(people, np.int64),
        np.zeros(most, np.int64),
        np.zeros(most, np.int64),
        ends,
    )
    return ends


def by_sample(chain: Chain, genes: Sequence[int]) -> int:
    """When the batch has left the chain, by A1: process by process, sample by sample.

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
