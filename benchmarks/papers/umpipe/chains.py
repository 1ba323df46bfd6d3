"""The best scheme of a chain by trying all of them: no bounds, nothing left out."""

# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from lightning_pipes.sim.loops.jit import JitKernel
from lightning_pipes.strategies.umpipe.network import Network
from lightning_pipes.strategies.umpipe.search.chain import Chain, chains_of_network


def tried(rows, sizes, times, ends, options):
    """The least time in which the batch leaves the chain. Schemes that begin alike share what they begin with: row k
    of `ends` has when each sample leaves process k, and `options` are those of the scheme that is tried."""
    processes, count = times.shape
    best = 1 << 60
    k = 0
    options[0] = -1
    while k >= 0:
        options[k] += 1
        if options[k] == count:
            k -= 1
            continue
        size = sizes[options[k]]
        time = times[k, options[k]]
        t = 0
        begin = 1
        while begin <= rows:
            end = min(begin + size, rows + 1)
            before = ends[k - 1, end - 1] if k > 0 else 0
            t = max(t, before) + time
            if k + 1 < processes:
                for j in range(begin, end):
                    ends[k, j] = t
            begin = end
        if k + 1 < processes:
            k += 1
            options[k] = -1
        elif t < best:
            best = t
    return best


ENUMERATION = JitKernel(tried, patience=0)


def best_of_chain(chain: Chain) -> int:
    """The least time of all Q^K schemes."""
    ends = np.zeros((chain.processes, chain.rows + 1), np.int64)
    options = np.zeros(chain.processes, np.int64)
    return int(ENUMERATION.fastest.run.tried(chain.rows, chain.sizes, chain.times, ends, options))


def best_by_trying(network: Network) -> int:
    """The optimum: the two directions do not wait for each other but at the barrier."""
    return sum(best_of_chain(chain) for chain in chains_of_network(network))
