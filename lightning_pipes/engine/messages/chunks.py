"""Divides trees into chunks: their order, sizes and contents. Nothing here sends anything.

tree     |  description  |  tensor 0  |        tensor 1        |t2|
chunks   |      0      |      1      |      2      |      3       |
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

FIRST_CHUNK, MIN_CHUNK, MAX_CHUNK = 2**16, 2**14, 2**20
"""Bytes of the first chunk, and the smallest and largest size of later ones."""
SECONDS = 0.005
"""Seconds that a chunk may take, and so delay a message of training that follows it."""


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
        size: bytes of the next chunk, at most.
    """

    size: int = FIRST_CHUNK

    def record_chunk(self, size: int, seconds: float) -> None:
        """Record the seconds of a chunk. The size doubles at most, because one chunk may have been fast by chance."""
        if size == self.size:  # a shorter chunk is not representative
            fitting = MAX_CHUNK if seconds <= 0 else int(size * SECONDS / seconds)
            self.size = max(MIN_CHUNK, min(MAX_CHUNK, fitting, 2 * size))


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
