"""One message as bytes: a fixed header, a description of its leaves, and the tensors themselves.

Gloo checks neither size nor order, so a message carries everything that its receiver must know and check. The structure
of the tree is sent once per channel and signature, and referred to by number afterwards.
"""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import is_
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from lightning_pipes.engine.watch.trust import TRUSTED, Seal, dumps, loads
from lightning_pipes.ir import Instruction, Kind, PipelineError, Span

KINDS = tuple(Kind)
_KIND_NUMBER = {kind: n for n, kind in enumerate(KINDS)}
_HEADER = struct.Struct("<8s q q 6i i i q")  # magic, window, sent_ns, instruction, signature, spec bytes, value bytes
HEADER_BYTES = _HEADER.size
_MAGIC = b"LPIPE01\0"
ALIGN = 64
"""Tensors start at multiples of this many bytes, so that they can be used where they lie."""
FRONT_BYTES = ALIGN
"""Bytes in front of every message that belong to the channel."""
_EXTRA = FRONT_BYTES + HEADER_BYTES
_SPARE, _POOLS = 8, 8
"""Wires kept for one kind of message, and kinds of messages for which any are."""


class Message(NamedTuple):
    """A message that has arrived.

    Attributes:
        key: window and receiving instruction.
        tree: tensors on the receiver's device and plain values.
        flags: for each tensor of the tree, in order, whether the sender wants its gradient.
        sent, posted, arrived: nanoseconds of the monotonic clock; `posted` is the time of the receive's posting.
    """

    key: tuple[int, Instruction]
    tree: Any
    flags: tuple[bool, ...]
    sent: int = 0
    posted: int = 0
    arrived: int = 0


@dataclass(frozen=True)
class Signature:
    """The structure of a tree without its values.

    Attributes:
        spec: the structure; None for a single tensor.
        leaves: shape and type of each tensor, None for a plain value.
        flags: for each tensor, whether its gradient is wanted.
    """

    spec: Any
    leaves: tuple[tuple[torch.Size, torch.dtype] | None, ...]
    flags: tuple[bool, ...]

    def to_bytes(self, seal: Seal | None) -> bytes:
        """Serialise the signature, with the structure as a tree of numbers."""
        skeleton = None if self.spec is None else pytree.tree_unflatten(range(len(self.leaves)), self.spec)
        return dumps((skeleton, self.leaves, self.flags), seal)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, seal: Seal | None) -> Signature:
        """Return the signature that `to_bytes` wrote."""
        skeleton, leaves, flags = loads(data, seal)
        return cls(None if skeleton is None else pytree.tree_structure(skeleton), leaves, flags)

    def build_tree(self, tensors: Sequence[torch.Tensor], values: Sequence[Any]) -> Any:
        """Return the tree of these tensors and plain values."""
        if self.spec is None:
            return tensors[0]
        tensor, value = iter(tensors), iter(values)
        return pytree.tree_unflatten([next(value) if leaf is None else next(tensor) for leaf in self.leaves], self.spec)

    @cached_property
    def tensor_offsets(self) -> list[int]:
        """Offset of each tensor among the tensors' bytes."""
        return self._layout[0]

    @cached_property
    def bytes(self) -> int:
        """Size of the tensors."""
        return self._layout[1]

    @cached_property
    def _layout(self) -> tuple[list[int], int]:
        at, starts = 0, []
        for shape, dtype in filter(None, self.leaves):
            starts.append(at)
            at += -(-shape.numel() * dtype.itemsize // ALIGN) * ALIGN
        return starts, at


class Wire:
    """The bytes of one message: FRONT_BYTES for the channel, the header, plain values, and the tensors."""

    def __init__(self, kind: tuple[int, int], signature: Signature, allocate: Callable[[int], torch.Tensor]) -> None:
        body = kind[1]
        self.kind = kind
        with torch.inference_mode(False):  # it may be filled again outside
            self.buffer = allocate(body + signature.bytes)
            described = filter(None, signature.leaves)
            self.places = [
                _view(self.buffer, body + at, *d) for at, d in zip(signature.tensor_offsets, described, strict=True)
            ]
        self.bytes = self.buffer.numpy().data
        self.address = self.buffer.data_ptr()

    def copy_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the tensors, which must not be part of a graph, to their places."""
        for place, tensor in zip(self.places, tensors, strict=True):
            place.copy_(tensor, non_blocking=True)


def pageable_bytes(size: int) -> torch.Tensor:
    """Return bytes in ordinary memory."""
    return torch.empty(size, dtype=torch.uint8)


def pinned_bytes(size: int) -> torch.Tensor:
    """Return bytes in pinned memory, for tensors that come from a GPU."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class FrozenLeaf:
    """A leaf of messages whose content never changes after it was sent.

    Consecutive messages often carry the same object, which is then serialized, and loaded by the receiver, only once.
    """


def _are_frozen(leaves: Sequence[Any]) -> bool:
    return all(isinstance(leaf, FrozenLeaf) for leaf in leaves)


class Encoder:
    """The sending end of one channel. Released wires are reused for a steady stream.

    Args:
        allocate: allocates the bytes of a wire.
        drop: called with each wire that is not kept any longer.
        seal: signs objects for the receiver.
    """

    def __init__(
        self,
        allocate: Callable[[int], torch.Tensor] = pageable_bytes,
        drop: Callable[[Wire], None] = lambda wire: None,
        seal: Seal | None = TRUSTED,
    ) -> None:
        self._seal = seal
        self._allocate = allocate
        self._drop = drop
        self._known: dict[Any, tuple[int, Signature]] = {}
        self._last_frozen: tuple[list[Any], bytes] = [], b""
        self._pools: OrderedDict[tuple[int, int], list[Wire]] = OrderedDict()
        self._lock = threading.Lock()  # wires may be given back by another thread

    def encode(
        self, key: tuple[int, Instruction], tree: Any, flags: tuple[bool, ...], sent: int
    ) -> tuple[Wire, Sequence[torch.Tensor]]:
        """Return a wire that is complete except for the tensors, and the tensors that belong there."""
        described: tuple[tuple[torch.Size, torch.dtype] | None, ...]
        if isinstance(tree, torch.Tensor):  # by far the most common, and worth a short way
            spec, tensors, values, described = None, [tree], b"", ((tree.shape, tree.dtype),)
        else:
            leaves, spec = pytree.tree_flatten(tree)
            described = tuple((t.shape, t.dtype) if isinstance(t, torch.Tensor) else None for t in leaves)
            tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
            plain = [v for v in leaves if not isinstance(v, torch.Tensor)]
            values = self._serialize(plain) if plain else b""
        known = self._known.get((spec, described, flags))
        spec_bytes = b""
        if known is None:
            known = self._known[spec, described, flags] = (len(self._known), Signature(spec, described, flags))
            spec_bytes = known[1].to_bytes(self._seal)
        number, signature = known
        extra = spec_bytes + values
        wire = self._wire((number, -(-(_EXTRA + len(extra)) // ALIGN) * ALIGN), signature)
        window, (kind, stage, job, batch, span) = key
        sizes = (number, len(spec_bytes), len(values))
        _HEADER.pack_into(
            wire.bytes, FRONT_BYTES, _MAGIC, window, sent, _KIND_NUMBER[kind], stage, job, batch, *span, *sizes
        )
        if extra:
            wire.bytes[_EXTRA : _EXTRA + len(extra)] = extra
        return wire, tensors

    def _serialize(self, leaves: list[Any]) -> bytes:
        """Return the leaves as bytes; those of the last message, if it had the same objects and they are frozen."""
        last, known = self._last_frozen
        if len(leaves) == len(last) and all(map(is_, leaves, last)):
            return known
        values = dumps(leaves, self._seal)
        if _are_frozen(leaves):
            self._last_frozen = leaves, values
        return values

    def release(self, wire: Wire) -> None:
        """Keep a delivered wire for another message, or drop it."""
        with self._lock:
            pool = self._pools.get(wire.kind)
            keep = pool is not None and len(pool) < _SPARE
            if pool is not None and keep:
                pool.append(wire)
        if not keep:
            self._drop(wire)

    def _wire(self, kind: tuple[int, int], signature: Signature) -> Wire:
        """Return a wire for messages of this kind: a signature's number, and the bytes before the tensors."""
        evicted: list[Wire] = []
        with self._lock:
            pool = self._pools.setdefault(kind, [])
            self._pools.move_to_end(kind)
            if len(self._pools) > _POOLS:  # shapes that change all the time must not pile up memory
                evicted = self._pools.popitem(last=False)[1]
            wire = pool.pop() if pool else None  # the one used last is still in the caches
        for old in evicted:
            self._drop(old)
        return Wire(kind, signature, self._allocate) if wire is None else wire


class ReceiveBuffer:
    """Bytes in which message after message arrives.

    Attributes:
        views: the tensors in it for each kind of received message, by the number of its signature.
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.bytes = buffer.numpy().data
        self.views: dict[int, list[torch.Tensor]] = {}


class Decoder:
    """The receiving end of one channel.

    Args:
        seal: checks the origin of objects.
    """

    def __init__(self, seal: Seal | None = TRUSTED) -> None:
        self._seal = seal
        self._signatures: dict[int, Signature] = {}
        self._last_frozen: tuple[bytes, Sequence[Any]] = b"", ()

    def decode(self, buffer: torch.Tensor, posted: int, arrived: int) -> Message:
        """Return the message in a byte tensor; its tensors are views of it.

        Raises:
            PipelineError: the bytes are no message of this version.
        """
        return self._read(ReceiveBuffer(buffer), posted, arrived, copy=False)

    def decode_copy(self, slot: ReceiveBuffer, arrived: int) -> Message:
        """Return the message in a buffer that may be overwritten afterwards.

        Raises:
            PipelineError: the bytes are no message of this version.
        """
        return self._read(slot, 0, arrived, copy=True)

    def _read(self, slot: ReceiveBuffer, posted: int, arrived: int, copy: bool) -> Message:
        view = slot.bytes
        magic, window, sent, kind, stage, job, batch, start, stop, number, n_spec, n_values = _HEADER.unpack_from(
            view, FRONT_BYTES
        )
        if magic != _MAGIC:
            raise PipelineError(f"received {bytes(magic)!r} instead of a message: do all ranks run the same version?")
        at = _EXTRA
        if n_spec:
            self._signatures[number] = Signature.from_bytes(view[at : at + n_spec], self._seal)
            at += n_spec
        signature = self._signatures[number]
        values = self._load(bytes(view[at : at + n_values])) if n_values else ()
        key = (window, _instruction(kind, stage, job, batch, start, stop))
        tensors = None if n_spec or n_values else slot.views.get(number)
        if tensors is None:
            body = -(-(at + n_values) // ALIGN) * ALIGN
            described = filter(None, signature.leaves)
            tensors = [
                _view(slot.buffer, body + s, *d) for s, d in zip(signature.tensor_offsets, described, strict=True)
            ]
            if not n_spec and not n_values:
                slot.views[number] = tensors
        if copy:
            tensors = [t.clone() for t in tensors]
        return Message(key, signature.build_tree(tensors, values), signature.flags, sent, posted, arrived)

    def _load(self, data: bytes) -> Sequence[Any]:
        """Return the leaves in `data`; those of the last message, if it had the same bytes and they are frozen."""
        if data == self._last_frozen[0]:
            return self._last_frozen[1]
        leaves: Sequence[Any] = loads(data, self._seal)
        if _are_frozen(leaves):
            self._last_frozen = data, leaves
        return leaves


@lru_cache(maxsize=4096)  # every batch repeats them
def _instruction(kind: int, stage: int, job: int, batch: int, start: int, stop: int) -> Instruction:
    return Instruction(KINDS[kind], stage, job, batch, Span(start, stop))


def _view(buffer: torch.Tensor, at: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    size = shape.numel() * dtype.itemsize
    return buffer[at : at + size].view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)
