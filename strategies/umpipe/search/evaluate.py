"""The time that schemes take, by loops over chunks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_pipes.ir import InputError, short_repr
from lightning_pipes.strategies.umpipe.network import Scheme, Times
from lightning_pipes.strategies.umpipe.search.chain import Chain, CutTables, chains_of_network
from lightning_pipes.strategies.umpipe.search.kernel import CHUNKS


def evaluate_schemes(network: CutTables, schemes: Sequence[Scheme]) -> Times:
    """Return the time that a batch takes with each scheme, all forwards before all backwards (E4), in the network's
    unit.

    Raises:
        InputError: a scheme that does not name an option for each process.
    """
    return sum(
        (
            evaluate_genes(chain, genes)
            for chain, genes in zip(chains_of_network(network), people_of(network, schemes), strict=True)
        ),
        start=np.zeros(len(schemes), np.int64),
    )


def people_of(network: CutTables, schemes: Sequence[Scheme]) -> tuple[Times, Times]:
    """Return the genes of schemes, a row each: forward, and backward.

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


def evaluate_genes(chain: Chain, people: Times) -> Times:
    """Return when the batch has left the chain, for each row of genes; `kernel.end_of_chain` in a row."""
    counts = chain.counts
    run = CHUNKS.select(int(counts[people].sum()) if len(people) else 0).run
    ends = np.zeros(len(people), np.int64)
    most = int(counts.max())
    run.ends_of_chains(
        chain.rows,
        chain.sizes,
        chain.times,
        np.ascontiguousarray(people, np.int64),
        np.zeros(most, np.int64),
        np.zeros(most, np.int64),
        ends,
    )
    return ends
