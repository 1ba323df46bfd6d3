"""The times of a pipeline's processes, by how finely each of them cuts a batch."""

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
    """How each process cuts a batch: the number of an option of the `Network`, in the order of its processes."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Network:
    """Processes of a pipeline in both directions, with the times of a chunk in each (section III-A).

    N stages have K = 2 N - 1 processes a direction, numbered from 0 in the order in which samples pass them: forward
    stage 0, the link from 0 to 1, stage 1, and so on; backward stage N - 1, the link back to N - 2, down to stage 0.
    Even ones compute, odd ones send. (The paper's E1 has it the wrong way round for backward.)

    A process has Q options. Option q cuts the batch into chunks of `sizes[q]` samples; the last one may be shorter, and
    takes as long.

    Attributes:
        rows: samples of a batch, the paper's P.
        sizes: of each option the samples of a chunk, from the coarsest to the finest.
        forward: whole numbers of any unit, K rows and Q columns: what one chunk takes. The paper's F_k(p).
        backward: the same for the other direction, B_k(q).

    Raises:
        InputError: sizes that do not fall or are no sizes of a batch, tables of other shapes, times that are no whole
            numbers from 0 on.
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
                f"sizes of chunks must fall from {self.rows}, the rows of a batch, or less to 1 or more, got "
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
                    f"{name} needs whole numbers from 0 on, without holes; got {short_repr(times.tolist())}"
                )
            object.__setattr__(self, name, np.ascontiguousarray(times, np.int64))
        if self.forward.shape != self.backward.shape:
            raise InputError(
                f"forward and backward need equally many processes, got {len(self.forward)} and {len(self.backward)}"
            )

    @classmethod
    def from_counts(cls, rows: int, counts: Sequence[int], forward: Times, backward: Times) -> Network:
        """Return a network with numbers of micro-batches as options: column i of the tables is for `counts[i]` of them.

        A micro-batch has ceil(P / p) samples; the paper's E3 takes p itself for a size. Where several counts come to
        the same size, each process and direction keeps the cheapest: all of them compute the same chunks.

        Raises:
            InputError: a count that is none, or larger than the batch; what `Network` refuses.
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
        """K = 2 N - 1, of each direction."""
        return len(self.forward)

    @property
    def stages(self) -> int:
        """N."""
        return (self.processes + 1) // 2

    @cached_property
    def counts(self) -> Times:
        """Number of chunks of the batch by option."""
        return np.array([-(-self.rows // size) for size in self.sizes], np.int64)

    def equal_scheme(self, option: int) -> Scheme:
        """GPipe's scheme: all processes take the same option."""
        return Scheme((option,) * self.processes, (option,) * self.processes)

    def sizes_of(self, scheme: Scheme) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the samples of a chunk of each process, forward and backward."""
        forward, backward = scheme
        return tuple(self.sizes[q] for q in forward), tuple(self.sizes[q] for q in backward)


def spans_of_size(rows: int, size: int, least: int = 1) -> tuple[Span, ...]:
    """Return micro-batches of `size` samples; the last one may be shorter, and joins the one before it if it has fewer
    than `least`."""
    starts = [0, *range(size, rows - least + 1, size)]
    return tuple(Span(a, b) for a, b in pairwise([*starts, rows]))


def align_spans(backward: tuple[Span, ...], forward: tuple[Span, ...], least: int) -> tuple[Span, ...]:
    """Return `backward` so that its parts in common with `forward` have at least `least` samples.

    A stage runs those parts one by one. Where a boundary is closer than that to one of `forward`, it moves there.
    """
    if least == 1 or backward == forward:
        return backward
    ends = [span.stop for span in forward]
    moved = (next((end for end in ends if abs(span.stop - end) < least), span.stop) for span in backward)
    return tuple(Span(a, b) for a, b in pairwise(dict.fromkeys([0, *moved])))
