"""One direction of a pipeline. The searches solve forward and backward as separate problems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from lightning_pipes.strategies.umpipe.network import Scheme, Times
from lightning_pipes.strategies.umpipe.search.kernel import CHUNK_KERNELS


class CutTables(Protocol):
    """The problem of cutting a batch: a `Network`, or tables with a column for every number of chunks."""

    @property
    def rows(self) -> int:
        """The number of samples in a batch."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of samples in a chunk for each option, in non-increasing order."""

    @property
    def forward(self) -> Times:
        """The duration of a chunk, with a row for each process and a column for each option."""

    @property
    def backward(self) -> Times:
        """The same for the other direction."""


class Chain(NamedTuple):
    """The processes of one direction: `times[k, q]` is the duration of a chunk of `sizes[q]` samples in process k."""

    rows: int
    sizes: Times
    times: Times

    @property
    def processes(self) -> int:
        """K = 2 N - 1, the number of processes."""
        return len(self.times)

    @property
    def options(self) -> int:
        """Q, the number of options."""
        return len(self.sizes)

    @property
    def counts(self) -> Times:
        """The number of chunks for each option."""
        return -(-self.rows // self.sizes)

    @property
    def equal_schemes(self) -> Times:
        """GPipe's schemes as rows: all processes take option 0, all processes take option 1, and so on."""
        return np.repeat(np.arange(self.options)[:, None], self.processes, axis=1)


def chains_of_network(cuts: CutTables) -> tuple[Chain, Chain]:
    """Return the forward and the backward chain.

    The time of a batch is the sum of the times of both chains, because backward begins after all forwards.
    """
    sizes = np.array(cuts.sizes, np.int64)
    return Chain(cuts.rows, sizes, cuts.forward), Chain(cuts.rows, sizes, cuts.backward)


@dataclass(frozen=True)
class SchemeSolution:
    """A scheme found by a search.

    Attributes:
        scheme: the options of all processes.
        value: the time of a batch with this scheme, all forwards before all backwards, in the unit of the network.
        lower_bound: a lower bound for the value of all schemes that the search considers.
    """

    scheme: Scheme
    value: int
    lower_bound: int

    @property
    def gap(self) -> float:
        """The maximum share of the lower bound by which another scheme may be better."""
        return (self.value - self.lower_bound) / max(1, self.lower_bound)


def evaluate_genes(chain: Chain, people: Times) -> Times:
    """Return the time at which the batch has left the chain, for each row of genes; see `kernel.end_of_chain`."""
    counts = chain.counts
    run = CHUNK_KERNELS.select(int(counts[people].sum()) if len(people) else 0).run
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
