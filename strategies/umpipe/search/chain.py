"""One direction of a pipeline, as the searches see it: forward and backward are problems of their own."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from lightning_pipes.strategies.umpipe.network import Times


class Cuts(Protocol):
    """A pipeline that is to be cut: a `Network`, or `networks.Tables`, which keep a column for every count."""

    @property
    def rows(self) -> int:
        """Samples of a batch."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of each option the samples of a chunk; they never rise."""

    @property
    def forward(self) -> Times:
        """The time of a chunk, a row for each process and a column for each option."""

    @property
    def backward(self) -> Times:
        """The same for the other direction."""


class Chain(NamedTuple):
    """The processes of one direction: `times[k, q]` is what a chunk of `sizes[q]` samples takes in process k."""

    rows: int
    sizes: Times
    times: Times

    @property
    def processes(self) -> int:
        """K = 2 N - 1."""
        return len(self.times)

    @property
    def options(self) -> int:
        """Q."""
        return len(self.sizes)

    @property
    def counts(self) -> Times:
        """Of each option the number of chunks."""
        return -(-self.rows // self.sizes)

    @property
    def equal(self) -> Times:
        """GPipe's schemes as rows: all processes take option 0, all take option 1, and so on."""
        return np.repeat(np.arange(self.options)[:, None], self.processes, axis=1)


def chains(cuts: Cuts) -> tuple[Chain, Chain]:
    """The forward and the backward chain. A batch takes the sum of their times, as backward waits for all forwards."""
    sizes = np.array(cuts.sizes, np.int64)
    return Chain(cuts.rows, sizes, cuts.forward), Chain(cuts.rows, sizes, cuts.backward)
