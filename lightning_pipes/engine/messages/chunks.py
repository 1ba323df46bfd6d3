"""How parcels become chunks: which goes next, how large it is, and whose bytes it holds. Nothing here sends anything.

parcel   |  description  |  tensor 0  |        tensor 1        |t2|
chunks   |      0      |      1      |      2      |      3       |
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

FIRST_CHUNK, MIN_CHUNK, MAX_CHUNK = 2**16, 2**14, 2**20
"""Bytes of a chunk: the first one, and what all others lie between."""
MAX_IN_FLIGHT = 8
"""Chunks from a rank to another at a time, at most: the peer has a buffer for each."""
SECONDS = 0.005
"""Seconds that a chunk may take: as long may it hold up a message of training that comes right after it has left."""


class SendQueue:
    """Parcels that wait to be sent to one rank. Whoever has least left goes first: what is small need not wait until a
    large one is through."""

    def __init__(self) -> None:
        self._left: dict[int, tuple[int, int]] = {}  # number -> next byte, and all of them

    def add(self, number: int, size: int) -> None:
        """A parcel of `size` bytes, at least one."""
        self._left[number] = (0, size)

    def __bool__(self) -> bool:
        return bool(self._left)

    def next_chunk(self, most: int) -> tuple[int, int, int]:
        """The number of a parcel and its bytes start to stop, `most` at most, that go next; there must be some."""
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
    """The size of chunks, from what those before have taken.

    Attributes:
        size: bytes of the next chunk, at most.
        best: bytes a second of the quickest one.
    """

    size: int = FIRST_CHUNK
    best: float = 0.0

    def record_chunk(self, size: int, seconds: float) -> None:
        """A chunk of `size` bytes took so long. At most doubles, for one chunk may have been quick by chance."""
        self.best = max(self.best, size / max(seconds, 1e-9))
        if size == self.size:  # what is shorter than it may be says little
            fitting = MAX_CHUNK if seconds <= 0 else int(size * SECONDS / seconds)
            self.size = max(MIN_CHUNK, min(MAX_CHUNK, fitting, 2 * size))


def queue_limit(training: float, chunks: float, service: float) -> int:
    """How many chunks wait on average behind messages of training (DynPipe, S V-C3, E8): as many as may be under way.

    That is the queue of the second class of two in an M/M/1 queue with priorities, whose server finishes what it has
    begun; the paper says that it is interrupted, and gives this formula, which is right for packets.

    Args:
        training, chunks: a second, with messages of training counted in chunks.
        service: chunks a second that the network could carry. Where it is asked for more, the queue grows for ever.
    """
    load = (training + chunks) / service if service > 0 else 1.0
    if load >= 1:
        return MAX_IN_FLIGHT
    return max(1, round(chunks * load / ((service - training) * (1 - load))))


class ByteLayout:
    """Parts that lie one behind the other, by their sizes in bytes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._ends = list(accumulate(sizes))
        self._sizes = sizes

    def locate_bytes(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The (part, first byte, last byte exclusive) that the bytes start to stop are, in order."""
        part = bisect_right(self._ends, start)
        while start < stop:
            begin = self._ends[part] - self._sizes[part]
            end = min(stop, self._ends[part])
            if end > start:
                yield part, start - begin, end - begin
            start, part = end, part + 1
