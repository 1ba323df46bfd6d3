"""The times of the processes of a pipeline, depending on how finely each of them cuts a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_pipes.ir import InputError, Span, check_count, short_repr

Times = npt.NDArray[np.int64]


class Scheme(NamedTuple):
    """How each process cuts a batch: the indices of options of the `Network`, in the order of its processes."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Network:
    """The processes of a pipeline in both directions, with the duration of a chunk in each of them (section III-A).

    N stages have K = 2 N - 1 processes per direction. They are numbered from 0 in the order in which samples pass
    through them: forward, stage 0, the link from 0 to 1, stage 1, and so on, and backward, stage N - 1, the link back
    to N - 2, and so on down to stage 0. Even processes compute, and odd processes send. (The paper's E1 has the wrong
    parity for backward.)

    A process has Q options. Option q cuts the batch into chunks of `sizes[q]` samples. The last chunk may be shorter,
    but it takes as long as the others.

    Attributes:
        rows: the number of samples in a batch, the paper's P.
        sizes: the number of samples in a chunk for each option, from the coarsest to the finest.
        forward: the duration of one chunk as an integer array of shape (K, Q), in any unit. The paper's F_k(p).
        backward: the same for the other direction, the paper's B_k(q).

    Raises:
        InputError: the sizes do not fall or do not fit the batch, the tables have another shape, or the times are not
            non-negative integers.
    """

    rows: int
    sizes: tuple[int, ...]
    forward: Times
    backward: Times

    def __post_init__(self) -> None:
        check_count("rows of a batch", self.rows)
        sizes = list(self.sizes)
        if not sizes or sizes != sorted(set(sizes), reverse=True) or sizes[-1] < 1 or sizes[0] > self.rows:
            raise InputError(
                f"sizes of chunks must descend from at most {self.rows}, the rows of a batch, to at least 1, got "
                f"{short_repr(self.sizes)}"
            )
        for name in ("forward", "backward"):
            times = np.asarray(getattr(self, name))
            if times.ndim != 2 or times.shape[1] != len(sizes) or times.shape[0] % 2 == 0:
                raise InputError(
                    f"{name} needs a row for each of 2 N - 1 processes and a column for each of {len(sizes)} sizes, "
                    f"got the shape {times.shape}"
                )
            if not np.issubdtype(times.dtype, np.integer) or times.min() < 0:
                raise InputError(
                    f"{name} needs whole numbers of at least 0 without gaps; got {short_repr(times.tolist())}"
                )
            object.__setattr__(self, name, np.ascontiguousarray(times, np.int64))
        if self.forward.shape != self.backward.shape:
            raise InputError(
                f"forward and backward need the same number of processes, got {len(self.forward)} and "
                f"{len(self.backward)}"
            )

    @classmethod
    def from_counts(cls, rows: int, counts: Sequence[int], forward: Times, backward: Times) -> Network:
        """Return a network with numbers of micro-batches as options.

        A micro-batch has ceil(P / p) samples, while the paper's E3 takes p itself as the size. If several counts result
        in the same size, each process and direction keeps the lowest time, because all of them compute the same chunks.

        Args:
            rows: the number of samples in a batch, the paper's P.
            counts: the numbers of micro-batches, the paper's p.
            forward: the duration of one micro-batch in each process. Column i is for `counts[i]` micro-batches.
            backward: the same for the other direction.

        Raises:
            InputError: a count is below 1 or larger than the batch, or the tables are invalid (see `Network`).
        """
        wrong = [p for p in counts if not 1 <= p <= rows]
        if wrong or not counts:
            raise InputError(
                f"a batch of {rows} samples is cut into 1 to {rows} micro-batches, got {short_repr(wrong or counts)}"
            )
        sizes = [-(-rows // p) for p in counts]
        kept = sorted(set(sizes), reverse=True)
        alike = [[i for i, size in enumerate(sizes) if size == each] for each in kept]

        def keep_cheapest(times: Times) -> Times:
            return np.stack([np.asarray(times)[:, columns].min(axis=1) for columns in alike], axis=1)

        for name, times in (("forward", forward), ("backward", backward)):
            if np.ndim(times) != 2 or np.shape(times)[1] != len(sizes):
                raise InputError(f"{name} needs a column for each of {len(sizes)} counts, got {np.shape(times)}")
        return cls(rows, tuple(kept), keep_cheapest(forward), keep_cheapest(backward))

    @property
    def processes(self) -> int:
        """K = 2 N - 1, the number of processes in each direction."""
        return len(self.forward)

    @property
    def stages(self) -> int:
        """N, the number of stages."""
        return (self.processes + 1) // 2

    @cached_property
    def counts(self) -> Times:
        """The number of chunks per batch for each option."""
        return np.array([-(-self.rows // size) for size in self.sizes], np.int64)


def spans_of_size(rows: int, size: int, least: int = 1) -> tuple[Span, ...]:
    """Return micro-batches of `size` samples.

    The last one may be shorter. If it has fewer than `least` samples, it is merged into the one before it.
    """
    starts = [0, *range(size, rows - least + 1, size)]
    return tuple(Span(a, b) for a, b in pairwise([*starts, rows]))


def align_spans(backward: tuple[Span, ...], forward: tuple[Span, ...], least: int) -> tuple[Span, ...]:
    """Return `backward`, changed so that its intersections with the spans of `forward` have at least `least` samples.

    A stage runs each intersection separately. A boundary that is closer than `least` to a boundary of `forward` is
    moved there.
    """
    if least == 1 or backward == forward:
        return backward
    ends = [span.stop for span in forward]
    moved = (next((end for end in ends if abs(span.stop - end) < least), span.stop) for span in backward)
    return tuple(Span(a, b) for a, b in pairwise(dict.fromkeys([0, *moved])))
