"""Made-up networks: the paper's, whose times have nothing to do with how much a chunk holds, and realistic ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lightning_pipes.ir import InputError, check_count, check_number
from lightning_pipes.strategies.umpipe.network import Network, Times


@dataclass(frozen=True, eq=False)
class Tables:
    """The times of processes by the number of micro-batches, one column for each count, as the paper's methods see it.

    Attributes:
        rows: samples of a batch.
        counts: of each column the number of micro-batches, rising.
        forward, backward: whole numbers, a row for each process.
    """

    rows: int
    counts: tuple[int, ...]
    forward: Times
    backward: Times

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of each column the samples of a chunk, ceil(P / p); several counts may come to the same."""
        return tuple(-(-self.rows // p) for p in self.counts)

    @property
    def network(self) -> Network:
        """The network with each size once, and the cheapest of its times: the same chunks, and no scheme lost."""
        return Network.from_counts(self.rows, self.counts, self.forward, self.backward)


def all_counts(rows: int) -> tuple[int, ...]:
    """1 to P, the option set that matches the numbers of the paper, which does not name its own."""
    return tuple(range(1, rows + 1))


def powers_of_two(rows: int) -> tuple[int, ...]:
    """1, 2, 4 and so on, not more than P."""
    return tuple(2**i for i in range(rows.bit_length()))


def simulated(
    stages: int, rows: int, seed: int = 0, counts: tuple[int, ...] | None = None, monotone: bool = False
) -> Tables:
    """The paper's simulation networks: times from 1 to 100, all equally likely, for each process and count.

    Nothing links a time to its count: two halves of a batch may take fifty times as long as the whole, or a fiftieth.
    This flatters unequal partitions, and says nothing of real networks. With `monotone`, the same times are sorted,
    so that a micro-batch of more samples never takes less; two halves may still take less than the whole.
    """
    counts = _checked(stages, rows, counts)
    rng = np.random.default_rng(seed)
    forward, backward = rng.integers(1, 101, (2, 2 * stages - 1, len(counts)))
    if monotone:
        forward, backward = (np.sort(each, axis=1)[:, ::-1] for each in (forward, backward))
    return Tables(rows, counts, forward, backward)


def realistic(
    stages: int,
    rows: int,
    seed: int = 0,
    counts: tuple[int, ...] | None = None,
    spread: float = 0.3,
    communication: float = 0.3,
) -> Tables:
    """Networks whose chunk of s samples takes overhead + work * max(s, saturation), as devices do.

    A whole batch is 1000 of work for a typical stage forward, and twice that backward. A launch costs 20; a device
    takes as long for fewer than P / 128 samples as for these. A link's batch is `communication` of a typical stage's
    forward, its latency is 5 and it has no saturation.

    Args:
        spread: standard deviation of the logarithm of each process's work.
        communication: a link's work as a share of a stage's.
    """
    counts = _checked(stages, rows, counts)
    for name, number in {"spread": spread, "communication": communication}.items():
        check_number(name, number, "a finite number of 0 or more", lambda x: 0 <= x < math.inf)
    rng = np.random.default_rng(seed)
    sizes = np.array([-(-rows // p) for p in counts])
    compute = np.arange(2 * stages - 1) % 2 == 0
    scale = np.exp(spread * rng.standard_normal((2, 2 * stages - 1)))
    share = np.where(compute, 1.0, communication)
    fixed = np.where(compute, 20, 5)[:, None]
    samples = np.where(compute[:, None], np.maximum(sizes, rows / 128), sizes)

    def times(work: Times) -> Times:
        return np.asarray(np.rint(fixed + 1000 * work[:, None] * samples / rows), np.int64)

    back = np.where(compute, 2, 1)
    return Tables(rows, counts, times(scale[0] * share), times((scale[1] * share * back)[::-1]))


def _checked(stages: int, rows: int, counts: tuple[int, ...] | None) -> tuple[int, ...]:
    check_count("stages", stages)
    check_count("rows of a batch", rows)
    counts = all_counts(rows) if counts is None else counts
    if not counts or list(counts) != sorted(set(counts)) or not 1 <= counts[0] <= counts[-1] <= rows:
        raise InputError(f"counts of micro-batches must rise from 1 or more to at most {rows}, got {counts}")
    return counts
