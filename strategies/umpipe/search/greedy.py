"""Schemes that one process after the other chooses: equal ones, the paper's local greedy and its global greedy."""

from __future__ import annotations

import numpy as np

from lightning_pipes.strategies.umpipe.network import Scheme, Times
from lightning_pipes.strategies.umpipe.search.chain import Chain, CutTables, SchemeSolution, chains_of_network
from lightning_pipes.strategies.umpipe.search.evaluate import evaluate_genes
from lightning_pipes.strategies.umpipe.search.kernel import CHUNKS

ROUNDS = 50
"""Of global greedy at most; it stops where a round changes nothing, usually after three to six."""


def best_equal_scheme(network: CutTables) -> SchemeSolution:
    """Return the best scheme of GPipe's, where all processes have the same option; the coarsest of equally good
    ones."""
    forward, backward = chains_of_network(network)
    ends = evaluate_genes(forward, forward.equal_schemes) + evaluate_genes(backward, backward.equal_schemes)
    best = int(ends.argmin())
    genes = (best,) * forward.processes
    return SchemeSolution(Scheme(genes, genes), int(ends[best]), int(ends[best]))


def local_greedy(network: CutTables) -> SchemeSolution:
    """Return the paper's LG (A5): each process in order takes the option with which the batch leaves it soonest.

    The first process takes what it ends soonest with alone, often the whole batch, and others wait for it. No bound.
    """
    return _of([choose_locally(chain) for chain in chains_of_network(network)])


def global_greedy(network: CutTables, start: Scheme | None = None, rounds: int = ROUNDS) -> SchemeSolution:
    """Return the paper's GG (A6): rounds of coordinate descent, each process taking what is best with all others as
    they are.

    It starts at the best equal scheme by default. No bound.
    """
    schemes = start or best_equal_scheme(network).scheme
    return _of(
        [
            descend_globally(chain, np.array(genes), rounds)
            for chain, genes in zip(chains_of_network(network), schemes, strict=True)
        ]
    )


def choose_locally(chain: Chain) -> tuple[Times, int]:
    """Return genes of `kernel.choose_locally`, and when the batch has left the chain."""
    genes = np.zeros(chain.processes, np.int64)
    ready, left, rest = np.zeros((3, chain.rows + 1), np.int64)
    run = CHUNKS.select(chain.processes * int(chain.counts.sum())).run
    run.choose_locally(chain.rows, chain.sizes, chain.times, genes, ready, left, rest)
    return genes, int(evaluate_genes(chain, genes[None])[0])


def descend_globally(chain: Chain, start: Times, rounds: int = ROUNDS) -> tuple[Times, int]:
    """Return genes of `kernel.descend_by_process` from `start` on, and when the batch has left the chain."""
    genes = np.array(start, np.int64)
    ready, left = np.zeros((2, chain.rows + 1), np.int64)
    rests = np.zeros((chain.processes + 1, chain.rows + 1), np.int64)
    run = CHUNKS.select(5 * chain.processes * int(chain.counts.sum())).run
    run.descend_by_process(chain.rows, chain.sizes, chain.times, genes, rounds, ready, left, rests)
    return genes, int(evaluate_genes(chain, genes[None])[0])


def _of(found: list[tuple[Times, int]]) -> SchemeSolution:
    (forward, there), (backward, back) = found
    return SchemeSolution(Scheme(tuple(forward.tolist()), tuple(backward.tolist())), there + back, 0)
