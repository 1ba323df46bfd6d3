"""Chunks of large trees of tensors: their order, their size, and their number in flight."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

FIRST_CHUNK_BYTES, MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 2**16, 2**14, 2**20
"""Bytes of the first chunk, and the smallest and largest size of later ones."""
MAX_FLIGHT_SECONDS = 0.005
"""Seconds that the chunks in flight may take, and so delay a message of training that follows them."""
MAX_IN_FLIGHT = 4
"""Chunks from a rank to another at a time, at most; the receiver has a buffer for each."""


class SendQueue:
    """Trees that wait to be sent to one rank. The one with the fewest bytes left goes first, so that small ones need
    not wait for large ones."""

    def __init__(self) -> None:
        self._left: dict[int, tuple[int, int]] = {}  # number -> next byte, and all of them

    def add(self, number: int, size: int) -> None:
        """Add a tree of `size` bytes, at least one."""
        self._left[number] = (0, size)

    def __bool__(self) -> bool:
        return bool(self._left)

    def next_chunk(self, most: int) -> tuple[int, int, int]:
        """Return the number of a tree and its next bytes, start to stop, `most` at most; the queue must not be
        empty."""
        number = min(self._left, key=lambda n: (self._left[n][1] - self._left[n][0], n))
        start, size = self._left[number]
        stop = min(start + most, size)
        if stop == size:
            del self._left[number]
        else:
            self._left[number] = (stop, size)
        return number, start, stop


@dataclass
class ChunkSizer:
    """Chooses the size of chunks from the times of earlier ones.

    Attributes:
        limit: the number of chunks that may be in flight; together they take MAX_FLIGHT_SECONDS.
        size: bytes of the next chunk, at most.
    """

    limit: int = 1
    size: int = FIRST_CHUNK_BYTES
    _speeds: deque[float] = field(default_factory=lambda: deque(maxlen=9))

    @property
    def speed(self) -> float:
        """Bytes a second of the link, the median of the last chunks; 0 before the first one."""
        return statistics.median(self._speeds) if self._speeds else 0.0

    def record_chunk(self, size: int, seconds: float) -> None:
        """Record the seconds of a chunk. The size doubles at most, because one chunk may have been fast by chance."""
        if size == self.size:  # a shorter chunk is not representative
            self._speeds.append(size / max(seconds, 1e-6))
            fitting = MAX_CHUNK_BYTES if seconds <= 0 else int(size * MAX_FLIGHT_SECONDS / self.limit / seconds)
            self.size = max(MIN_CHUNK_BYTES, min(MAX_CHUNK_BYTES, fitting, 2 * size))

    def set_limit(self, limit: int) -> None:
        """Divide the bytes in flight among this number of chunks, or among fewer chunks if they would be too small."""
        limit = max(1, min(limit, int(MAX_FLIGHT_SECONDS * self.speed) // MIN_CHUNK_BYTES))
        if limit != self.limit:
            self.size = max(MIN_CHUNK_BYTES, min(MAX_CHUNK_BYTES, self.size * self.limit // limit))
            self.limit = limit


def limit_queue(training: float, bulk: float, service: float) -> int:
    """Return the mean number of chunks that wait behind messages of training, at most MAX_IN_FLIGHT.

    It is the second class of an M/M/1 queue with two priorities and a server that finishes what it has begun (DynPipe,
    S V-C3, E8; the paper's text has a server that interrupts).

    Args:
        training, bulk: measured rates of both, such as bytes a second.
        service: the rate of the link, in the same unit. Where both rates reach it the queue has no limit.
    """
    load = (training + bulk) / service if service > 0 else 0.0
    if load >= 1:
        return MAX_IN_FLIGHT if training < service else 1
    return min(MAX_IN_FLIGHT, max(1, round(bulk * load / ((service - training) * (1 - load))))) if load else 1


class ByteLayout:
    """Parts that lie one behind the other, by their sizes in bytes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._ends = list(accumulate(sizes))
        self._sizes = sizes

    def locate_bytes(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the (part, first byte, last byte exclusive) of the bytes start to stop, in order."""
        part = bisect_right(self._ends, start)
        while start < stop:
            begin = self._ends[part] - self._sizes[part]
            end = min(stop, self._ends[part])
            if end > start:
                yield part, start - begin, end - begin
            start, part = end, part + 1
