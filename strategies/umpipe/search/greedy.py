"""The two greedy searches of the paper (A5 and A6) for one direction."""

from __future__ import annotations

import numpy as np

from lightning_pipes.strategies.umpipe.network import Times
from lightning_pipes.strategies.umpipe.search.chain import Chain, evaluate_genes
from lightning_pipes.strategies.umpipe.search.kernel import CHUNK_KERNELS

MAX_GREEDY_ROUNDS = 50
"""The maximum number of rounds of global greedy. It stops after a round without a change, usually after 3 to 6."""


def choose_locally(chain: Chain) -> tuple[Times, int]:
    """Return the genes of `kernel.choose_locally`, and the time at which the batch has left the chain."""
    genes = np.zeros(chain.processes, np.int64)
    ready, left, rest = np.zeros((3, chain.rows + 1), np.int64)
    run = CHUNK_KERNELS.select(chain.processes * int(chain.counts.sum())).run
    run.choose_locally(chain.rows, chain.sizes, chain.times, genes, ready, left, rest)
    return genes, int(evaluate_genes(chain, genes[None])[0])


def descend_globally(chain: Chain, start: Times, rounds: int = MAX_GREEDY_ROUNDS) -> tuple[Times, int]:
    """Return the genes of `kernel.descend_by_process`, and the time at which the batch has left the chain."""
    genes = np.array(start, np.int64)
    ready, left = np.zeros((2, chain.rows + 1), np.int64)
    rests = np.zeros((chain.processes + 1, chain.rows + 1), np.int64)
    run = CHUNK_KERNELS.select(5 * chain.processes * int(chain.counts.sum())).run
    run.descend_by_process(chain.rows, chain.sizes, chain.times, genes, rounds, ready, left, rests)
    return genes, int(evaluate_genes(chain, genes[None])[0])
