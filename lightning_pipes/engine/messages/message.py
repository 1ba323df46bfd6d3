"""The binary format of messages: a fixed header, a description of the leaves, and the tensors.

Gloo checks neither sizes nor order, so each message carries all information that its receiver needs to interpret and
check it. The structure of a tree is sent once per channel and signature. Later messages refer to it by number.
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

from lightning_pipes.engine.watch.trust import TRUSTED_SEAL, Seal, dumps, loads
from lightning_pipes.ir import Instruction, Kind, PipelineError, Span

INSTRUCTION_KINDS = tuple(Kind)
_KIND_NUMBER = {kind: n for n, kind in enumerate(INSTRUCTION_KINDS)}
_HEADER = struct.Struct("<8s q q 6i i i q")  # magic, window, sent_ns, instruction, signature, spec bytes, value bytes
HEADER_BYTES = _HEADER.size
_MAGIC = b"LPIPE01\0"
ALIGNMENT_BYTES = 64
"""Alignment of tensors in a message, in bytes. It allows the receiver to use the tensors in place."""
FRONT_BYTES = ALIGNMENT_BYTES
"""Number of bytes in front of each message that are reserved for the channel."""
_EXTRA = FRONT_BYTES + HEADER_BYTES
_MAX_SPARE_WIRES, _MAX_WIRE_POOLS = 8, 8
"""Maximum number of spare wires for each kind of message, and maximum number of kinds for which spare wires are
kept."""
MAX_SIGNATURES = 1024
"""Number of signatures that both ends of a channel keep. The oldest one is forgotten first."""


class Message(NamedTuple):
    """A message that has arrived.

    Attributes:
        key: the window, and the instruction that receives the message.
        tree: tensors on the device of the receiver, and plain values.
        flags: for each tensor of the tree, in order, whether the sender needs its gradient.
        sent, posted, arrived: the times at which the message was sent, its receive was posted, and the message arrived,
            in nanoseconds of the monotonic clock.
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
        spec: the structure, or None for a single tensor.
        leaves: the shape and dtype of each tensor, and None for each plain value.
        flags: for each tensor, whether the sender needs its gradient.
    """

    spec: Any
    leaves: tuple[tuple[torch.Size, torch.dtype] | None, ...]
    flags: tuple[bool, ...]

    def to_bytes(self, seal: Seal | None) -> bytes:
        """Serialize the signature. The structure is written as a tree of numbers."""
        skeleton = None if self.spec is None else pytree.tree_unflatten(range(len(self.leaves)), self.spec)
        return dumps((skeleton, self.leaves, self.flags), seal)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, seal: Seal | None) -> Signature:
        """Deserialize a signature that was written by `to_bytes`."""
        skeleton, leaves, flags = loads(data, seal)
        return cls(None if skeleton is None else pytree.tree_structure(skeleton), leaves, flags)

    def build_tree(self, tensors: Sequence[torch.Tensor], values: Sequence[Any]) -> Any:
        """Build a tree with this structure from its tensors and plain values."""
        if self.spec is None:
            return tensors[0]
        tensor, value = iter(tensors), iter(values)
        return pytree.tree_unflatten([next(value) if leaf is None else next(tensor) for leaf in self.leaves], self.spec)

    @cached_property
    def tensor_offsets(self) -> list[int]:
        """Offset of each tensor from the first one, in bytes."""
        return self._layout[0]

    @cached_property
    def bytes(self) -> int:
        """Total size of the tensors in bytes, including their alignment."""
        return self._layout[1]

    @cached_property
    def _layout(self) -> tuple[list[int], int]:
        at, starts = 0, []
        for shape, dtype in filter(None, self.leaves):
            starts.append(at)
            at += -(-shape.numel() * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return starts, at


class Wire:
    """The bytes of one message: `FRONT_BYTES` for the channel, the header, the plain values, and the tensors."""

    def __init__(self, kind: tuple[int, int], signature: Signature, allocate: Callable[[int], torch.Tensor]) -> None:
        body = kind[1]
        self.kind = kind
        with torch.inference_mode(False):  # the buffer may be filled again outside of inference mode
            self.buffer = allocate(body + signature.bytes)
            described = filter(None, signature.leaves)
            self.places = [
                _view(self.buffer, body + at, *d) for at, d in zip(signature.tensor_offsets, described, strict=True)
            ]
        self.bytes = self.buffer.numpy().data
        self.address = self.buffer.data_ptr()

    def copy_tensors(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the tensors, which must be detached from any autograd graph, to their places in the buffer."""
        for place, tensor in zip(self.places, tensors, strict=True):
            place.copy_(tensor, non_blocking=True)


def pageable_bytes(size: int) -> torch.Tensor:
    """Allocate bytes in pageable memory."""
    return torch.empty(size, dtype=torch.uint8)


def pinned_bytes(size: int) -> torch.Tensor:
    """Allocate bytes in pinned memory, for tensors that are copied from a GPU."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class FrozenLeaf:
    """Base class for leaves of messages that do not change after they were sent.

    Consecutive messages often contain the same object. It is then serialized by the sender and deserialized by the
    receiver only once.
    """


def _are_frozen(leaves: Sequence[Any]) -> bool:
    return all(isinstance(leaf, FrozenLeaf) for leaf in leaves)


class Encoder:
    """The sending end of one channel. It reuses the wires that are released after delivery.

    Args:
        allocate: allocates the bytes of a wire.
        drop: called with each wire that is not kept any longer.
        seal: signs objects for the receiver.
    """

    def __init__(
        self,
        allocate: Callable[[int], torch.Tensor] = pageable_bytes,
        drop: Callable[[Wire], None] = lambda wire: None,
        seal: Seal | None = TRUSTED_SEAL,
    ) -> None:
        self._seal = seal
        self._allocate = allocate
        self._drop = drop
        self._known: dict[Any, tuple[int, Signature]] = {}  # the newest MAX_SIGNATURES, oldest first
        self._made = 0
        self._last_frozen: tuple[list[Any], bytes] = [], b""
        self._pools: OrderedDict[tuple[int, int], list[Wire]] = OrderedDict()
        self._lock = threading.Lock()  # another thread may release wires

    def encode(
        self, key: tuple[int, Instruction], tree: Any, flags: tuple[bool, ...], sent: int
    ) -> tuple[Wire, Sequence[torch.Tensor]]:
        """Encode a message except for the content of its tensors.

        Args:
            key: the window, and the instruction that receives the message.
            tree: tensors and plain values.
            flags: for each tensor of the tree, whether the sender needs its gradient.
            sent: the current time in nanoseconds of the monotonic clock.

        Returns:
            The wire, which is complete except for the tensors, and the tensors to be copied to it with
            `Wire.copy_tensors`.
        """
        described: tuple[tuple[torch.Size, torch.dtype] | None, ...]
        if isinstance(tree, torch.Tensor):  # a fast path for the most common case
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
            known = self._known[spec, described, flags] = (self._made, Signature(spec, described, flags))
            spec_bytes = known[1].to_bytes(self._seal)
            self._made += 1
            if self._made > MAX_SIGNATURES:
                del self._known[next(iter(self._known))]
        number, signature = known
        extra = spec_bytes + values
        wire = self._wire((number, -(-(_EXTRA + len(extra)) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES), signature)
        window, (kind, stage, job, batch, span) = key
        sizes = (number, len(spec_bytes), len(values))
        _HEADER.pack_into(
            wire.bytes, FRONT_BYTES, _MAGIC, window, sent, _KIND_NUMBER[kind], stage, job, batch, *span, *sizes
        )
        if extra:
            wire.bytes[_EXTRA : _EXTRA + len(extra)] = extra
        return wire, tensors

    def _serialize(self, leaves: list[Any]) -> bytes:
        """Serialize the leaves.

        If the leaves are frozen and identical to the leaves of the last message, the same bytes are returned again.
        """
        last, known = self._last_frozen
        if len(leaves) == len(last) and all(map(is_, leaves, last)):
            return known
        values = dumps(leaves, self._seal)
        if _are_frozen(leaves):
            self._last_frozen = leaves, values
        return values

    def release(self, wire: Wire) -> None:
        """Keep a delivered wire for another message, or drop it if enough spare wires of its kind exist."""
        with self._lock:
            pool = self._pools.get(wire.kind)
            keep = pool is not None and len(pool) < _MAX_SPARE_WIRES
            if pool is not None and keep:
                pool.append(wire)
        if not keep:
            self._drop(wire)

    def _wire(self, kind: tuple[int, int], signature: Signature) -> Wire:
        """Return a wire for messages of one kind, reusing a spare one if possible.

        The kind consists of the number of the signature and the number of bytes before the tensors.
        """
        evicted: list[Wire] = []
        with self._lock:
            pool = self._pools.setdefault(kind, [])
            self._pools.move_to_end(kind)
            if len(self._pools) > _MAX_WIRE_POOLS:  # bounds the memory if shapes change all the time
                evicted = self._pools.popitem(last=False)[1]
            wire = pool.pop() if pool else None  # the most recently used wire may still be in the CPU caches
        for old in evicted:
            self._drop(old)
        return Wire(kind, signature, self._allocate) if wire is None else wire


class ReceiveBuffer:
    """A buffer that is reused for the messages of one slot.

    Attributes:
        views: for each kind of message received so far, by the number of its signature, the tensors as views of the
            buffer.
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.bytes = buffer.numpy().data
        self.views: dict[int, list[torch.Tensor]] = {}


class Decoder:
    """The receiving end of one channel.

    Args:
        seal: verifies the origin of objects.
    """

    def __init__(self, seal: Seal | None = TRUSTED_SEAL) -> None:
        self._seal = seal
        self._signatures: dict[int, Signature] = {}
        self._last_frozen: tuple[bytes, Sequence[Any]] = b"", ()

    def decode(self, buffer: torch.Tensor, posted: int, arrived: int) -> Message:
        """Decode the message in a byte tensor. The tensors of the message are views of the byte tensor.

        Args:
            buffer: the received bytes.
            posted: the time at which the receive was posted, in nanoseconds.
            arrived: the time at which the message arrived, in nanoseconds.

        Raises:
            PipelineError: the bytes are not a message of this version.
        """
        return self._read(ReceiveBuffer(buffer), posted, arrived, copy=False)

    def decode_copy(self, slot: ReceiveBuffer, arrived: int) -> Message:
        """Decode the message in a buffer. The tensors are copied, so that the buffer may be overwritten afterwards.

        Args:
            slot: the buffer that contains the message.
            arrived: the time at which the message arrived, in nanoseconds.

        Raises:
            PipelineError: the bytes are not a message of this version.
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
            self._signatures.pop(number - MAX_SIGNATURES, None)  # the sender has forgotten it
            at += n_spec
        signature = self._signatures[number]
        values = self._load(bytes(view[at : at + n_values])) if n_values else ()
        key = (window, _instruction(kind, stage, job, batch, start, stop))
        tensors = None if n_spec or n_values else slot.views.get(number)
        if tensors is None:
            body = -(-(at + n_values) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            described = filter(None, signature.leaves)
            tensors = [
                _view(slot.buffer, body + s, *d) for s, d in zip(signature.tensor_offsets, described, strict=True)
            ]
            if not n_spec and not n_values:
                slot.views[number] = tensors
                if len(slot.views) > MAX_SIGNATURES:
                    del slot.views[next(iter(slot.views))]
        if copy:
            tensors = [t.clone() for t in tensors]
        return Message(key, signature.build_tree(tensors, values), signature.flags, sent, posted, arrived)

    def _load(self, data: bytes) -> Sequence[Any]:
        """Deserialize the leaves.

        If the bytes are equal to those of the last message and its leaves are frozen, the same leaves are returned
        again.
        """
        if data == self._last_frozen[0]:
            return self._last_frozen[1]
        leaves: Sequence[Any] = loads(data, self._seal)
        if _are_frozen(leaves):
            self._last_frozen = data, leaves
        return leaves


@lru_cache(maxsize=4096)  # every batch uses the same instructions
def _instruction(kind: int, stage: int, job: int, batch: int, start: int, stop: int) -> Instruction:
    return Instruction(INSTRUCTION_KINDS[kind], stage, job, batch, Span(start, stop))


def _view(buffer: torch.Tensor, at: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    size = shape.numel() * dtype.itemsize
    return buffer[at : at + size].view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)
