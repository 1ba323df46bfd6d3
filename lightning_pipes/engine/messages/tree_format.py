"""The text format of a tree of tensors: reading it runs no code and unpickles nothing, whatever its origin."""

from __future__ import annotations

import json
import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from lightning_pipes.ir import InputError, PipelineError

TensorSpecs = list[tuple[tuple[int, ...], torch.dtype]]
"""Shape and type of each tensor."""
_PLAIN = (str, int, float)  # bool is an int
_TENSOR, _LIST, _TUPLE, _DICT = "tensor", "list", "tuple", "dict"
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def pack_tree(content: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Return a description of `content`, and its tensors in order. It may hold dicts, lists and tuples of tensors,
    numbers, texts and None.

    Subclasses arrive as what they derive from: an OrderedDict as a dict, a Parameter as a tensor.

    Raises:
        InputError: something else is in it.
    """
    tensors: list[torch.Tensor] = []
    return json.dumps(_pack(content, tensors, ""), separators=(",", ":")).encode(), tensors


def parse_description(description: bytes | memoryview) -> tuple[Any, TensorSpecs]:
    """Return the skeleton that `fill_skeleton` fills with tensors, and the specs of the tensors.

    Raises:
        PipelineError: `pack_tree` did not write this.
    """
    try:
        skeleton = json.loads(bytes(description))
        return skeleton, [(tuple(shape), _DTYPES[dtype]) for shape, dtype in _tensors(skeleton)]
    except (ValueError, KeyError, TypeError) as error:
        raise PipelineError(
            f"received data that is no bulk transfer ({type(error).__name__}: {error}): do all ranks run the same "
            f"version?"
        ) from error


def fill_skeleton(skeleton: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Return the packed tree, with these tensors."""
    if not isinstance(skeleton, list):
        return skeleton
    kind, *parts = skeleton
    if kind == _TENSOR:
        return next(tensors)
    if kind == _DICT:
        return {fill_skeleton(key, tensors): fill_skeleton(value, tensors) for key, value in parts}
    found = [fill_skeleton(part, tensors) for part in parts]
    return tuple(found) if kind == _TUPLE else found


def _pack(content: Any, tensors: list[torch.Tensor], where: str) -> Any:
    if isinstance(content, torch.Tensor):
        if content.layout is not torch.strided or content.is_meta or content.is_quantized:
            raise InputError(
                f"a bulk transfer can't carry {where or 'this'}: a tensor of layout {content.layout} on "
                f"{content.device}. "
                "Send the plain tensors that it is made of"
            )
        tensors.append(content)
        return [_TENSOR, list(content.shape), str(content.dtype)]
    if content is None or isinstance(content, _PLAIN):
        return content
    if isinstance(content, dict):
        items = content.items()
        return [
            _DICT,
            *([_pack(k, tensors, f"a key of {where}"), _pack(v, tensors, f"{where}[{k!r}]")] for k, v in items),
        ]
    if isinstance(content, list | tuple):
        kind = _LIST if isinstance(content, list) else _TUPLE
        return [kind, *(_pack(part, tensors, f"{where}[{n}]") for n, part in enumerate(content))]
    raise InputError(
        f"a bulk transfer can't carry {where or 'this'}: a {type(content).__name__}. It holds dicts, lists and tuples "
        f"of "
        "tensors, numbers, texts and None; turn it into these"
    )


def _tensors(skeleton: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(skeleton, list):
        kind, *parts = skeleton
        if kind == _TENSOR:
            shape, dtype = parts
            yield shape, dtype
        elif kind == _DICT:
            for key, value in parts:
                yield from _tensors(key)
                yield from _tensors(value)
        elif kind in (_LIST, _TUPLE):
            for part in parts:
                yield from _tensors(part)
        else:
            raise ValueError(f"{kind!r} is no kind of content")


FIRST_CHUNK, MIN_CHUNK, MAX_CHUNK = 2**16, 2**14, 2**20
"""Bytes of the first chunk, and the smallest and largest size of later ones."""
SECONDS = 0.005
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
        limit: how many may be in flight; together they take SECONDS.
        size: bytes of the next chunk, at most.
    """

    limit: int = 1
    size: int = FIRST_CHUNK
    _speeds: deque[float] = field(default_factory=lambda: deque(maxlen=9))

    @property
    def speed(self) -> float:
        """Bytes a second of the link, the median of the last chunks; 0 before the first one."""
        return statistics.median(self._speeds) if self._speeds else 0.0

    def record_chunk(self, size: int, seconds: float) -> None:
        """Record the seconds of a chunk. The size doubles at most, because one chunk may have been fast by chance."""
        if size == self.size:  # a shorter chunk is not representative
            self._speeds.append(size / max(seconds, 1e-6))
            fitting = MAX_CHUNK if seconds <= 0 else int(size * SECONDS / self.limit / seconds)
            self.size = max(MIN_CHUNK, min(MAX_CHUNK, fitting, 2 * size))

    def set_limit(self, limit: int) -> None:
        """Share the bytes in flight among so many chunks, or fewer where these would be too small."""
        limit = max(1, min(limit, int(SECONDS * self.speed) // MIN_CHUNK))
        if limit != self.limit:
            self.size = max(MIN_CHUNK, min(MAX_CHUNK, self.size * self.limit // limit))
            self.limit = limit


def limit_queue(training: float, bulk: float, service: float) -> int:
    """Return how many chunks queue behind messages of training on the average, at most MAX_IN_FLIGHT.

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
