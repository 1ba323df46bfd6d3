"""One direction of a pipeline, as the searches see it: forward and backward are problems of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from lightning_pipes.strategies.umpipe.network import Scheme, Times


class CutTables(Protocol):
    """A pipeline that is to be cut: a `Network`, or `networks.Tables`, which keep a column for every count."""

    @property
    def rows(self) -> int:
        """Samples of a batch."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of a chunk by option; they never rise."""

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
        """Number of chunks by option."""
        return -(-self.rows // self.sizes)

    @property
    def equal_schemes(self) -> Times:
        """GPipe's schemes as rows: all processes take option 0, all take option 1, and so on."""
        return np.repeat(np.arange(self.options)[:, None], self.processes, axis=1)


def chains_of_network(cuts: CutTables) -> tuple[Chain, Chain]:
    """Return the forward and the backward chain. A batch takes the sum of their times, as backward waits for all
    forwards."""
    sizes = np.array(cuts.sizes, np.int64)
    return Chain(cuts.rows, sizes, cuts.forward), Chain(cuts.rows, sizes, cuts.backward)


@dataclass(frozen=True)
class SchemeSolution:
    """A scheme that was found.

    Attributes:
        scheme: the options of all processes.
        value: what a batch takes with it, all forwards before all backwards, in the network's unit.
        lower_bound: no scheme that the search may take goes below this.
        is_proven: nor does any go below `value`.
    """

    scheme: Scheme
    value: int
    lower_bound: int

    @property
    def is_proven(self) -> bool:
        """Whether no scheme that the search may take is better."""
        return self.lower_bound >= self.value

    @property
    def gap(self) -> float:
        """How much better another scheme may be at most, as a share of the lower bound."""
        return (self.value - self.lower_bound) / max(1, self.lower_bound)
