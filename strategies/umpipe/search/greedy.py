"""Schemes that one process after the other chooses: equal ones, the paper's local greedy and its global greedy."""

from __future__ import annotations

import numpy as np

from lightning_pipes.strategies.umpipe.network import Scheme, Times
from lightning_pipes.strategies.umpipe.search.chain import Chain, Cuts, chains
from lightning_pipes.strategies.umpipe.search.evaluate import ended
from lightning_pipes.strategies.umpipe.search.kernel import CHUNKS
from lightning_pipes.strategies.umpipe.search.solved import Solved

ROUNDS = 50
"""Of global greedy at most; it stops where a round changes nothing, usually after three to six."""


def gpipe(network: Cuts) -> Solved:
    """The best scheme of GPipe's, where all processes have the same option; the coarsest of equally good ones."""
    forward, backward = chains(network)
    ends = ended(forward, forward.equal) + ended(backward, backward.equal)
    best = int(ends.argmin())
    genes = (best,) * forward.processes
    return Solved(Scheme(genes, genes), int(ends[best]), int(ends[best]))


def local_greedy(network: Cuts) -> Solved:
    """The paper's LG (A5): each process in order takes the option with which the batch leaves it soonest.

    The first process takes what it ends soonest with alone, often the whole batch, and others wait for it. No bound.
    """
    return _of([local(chain) for chain in chains(network)])


def global_greedy(network: Cuts, start: Scheme | None = None, rounds: int = ROUNDS) -> Solved:
    """The paper's GG (A6): rounds of coordinate descent, each process taking what is best with all others as they are.

    It starts at the best equal scheme by default. No bound.
    """
    schemes = start or gpipe(network).scheme
    return _of(
        [descended(chain, np.array(genes), rounds) for chain, genes in zip(chains(network), schemes, strict=True)]
    )


def local(chain: Chain) -> tuple[Times, int]:
    """Genes of `kernel.local`, and when the batch has left the chain."""
    genes = np.zeros(chain.processes, np.int64)
    ready, left, rest = np.zeros((3, chain.rows + 1), np.int64)
    run = CHUNKS.select(chain.processes * int(chain.counts.sum())).run
    run.local(chain.rows, chain.sizes, chain.times, genes, ready, left, rest)
    return genes, int(ended(chain, genes[None])[0])


def descended(chain: Chain, start: Times, rounds: int = ROUNDS) -> tuple[Times, int]:
    """Genes of `kernel.descended` from `start` on, and when the batch has left the chain."""
    genes = np.array(start, np.int64)
    ready, left = np.zeros((2, chain.rows + 1), np.int64)
    rests = np.zeros((chain.processes + 1, chain.rows + 1), np.int64)
    run = CHUNKS.select(5 * chain.processes * int(chain.counts.sum())).run
    run.descended(chain.rows, chain.sizes, chain.times, genes, rounds, ready, left, rests)
    return genes, int(ended(chain, genes[None])[0])


def _of(found: list[tuple[Times, int]]) -> Solved:
    (forward, there), (backward, back) = found
    return Solved(Scheme(tuple(forward.tolist()), tuple(backward.tolist())), there + back, 0)
