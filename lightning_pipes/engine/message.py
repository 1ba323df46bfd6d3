"""One message as bytes: a fixed header, what its leaves are, and the tensors themselves.

gloo checks neither size nor order, so everything that a receiver must know travels along and is checked. The
structure of the tree is pickled once per channel and signature, and named by number afterwards.
"""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from lightning_pipes.ir import Instruction, Kind, PipelineError, Span

KINDS = tuple(Kind)
_KIND_NUMBER = {kind: n for n, kind in enumerate(KINDS)}
_HEADER = struct.Struct("<8s q q 6i i i q")  # magic, window, sent_ns, instruction, signature, spec bytes, value bytes
HEADER_BYTES = _HEADER.size
_MAGIC = b"LPIPE01\0"
ALIGN = 64
"""Tensors start at multiples of this many bytes, so that they can be used where they lie."""
FRONT_BYTES = ALIGN
"""Left free in front of every message for what the channel writes there."""


@dataclass(frozen=True)
class Message:
    """What arrived.

    Attributes:
        key: window and receiving instruction.
        tree: tensors on the receiver's device and plain values.
        flags: for each tensor of the tree, in order, whether the sender wants its gradient.
        sent, posted, arrived: nanoseconds of the monotonic clock; posted is when the receive was.
        bytes: size on the wire.
    """

    key: tuple[int, Instruction]
    tree: Any
    flags: tuple[bool, ...]
    sent: int = 0
    posted: int = 0
    arrived: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class Signature:
    """What a tree is made of, its values aside.

    Attributes:
        spec: the structure; None for a single tensor.
        leaves: shape and type of each tensor, None for a plain value.
        flags: for each tensor, whether its gradient is wanted.
    """

    spec: Any
    leaves: tuple[tuple[torch.Size, torch.dtype] | None, ...]
    flags: tuple[bool, ...]

    def to_bytes(self) -> bytes:
        """Itself pickled, the structure as a tree of numbers."""
        skeleton = None if self.spec is None else pytree.tree_unflatten(range(len(self.leaves)), self.spec)
        return pickle.dumps((skeleton, self.leaves, self.flags))

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Signature:
        """What `to_bytes` wrote."""
        skeleton, leaves, flags = pickle.loads(data)
        return cls(None if skeleton is None else pytree.tree_structure(skeleton), leaves, flags)

    def offsets(self) -> tuple[list[int], int]:
        """Where each tensor starts among the tensors' bytes, and how many bytes they take."""
        at, starts = 0, []
        for leaf in self.leaves:
            starts.append(at)
            if leaf is not None:
                shape, dtype = leaf
                at += -(-shape.numel() * dtype.itemsize // ALIGN) * ALIGN
        return starts, at


def is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


class Encoder:
    """The sending end of one channel."""

    def __init__(self) -> None:
        self._numbers: dict[Any, tuple[int, Signature, list[int], int]] = {}

    def encode(
        self, key: tuple[int, Instruction], tree: Any, flags: tuple[bool, ...], sent: int
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[int]]:
        """A byte tensor with everything but the tensors' contents filled in, the tensors, and where each belongs.

        Its first FRONT_BYTES are left free.
        """
        if is_tensor(tree):
            leaves, spec = [tree], None
        else:
            leaves, spec = pytree.tree_flatten(tree)
        described = tuple((t.shape, t.dtype) if is_tensor(t) else None for t in leaves)
        known = self._numbers.get((spec, described, flags))
        spec_bytes = b""
        if known is None:
            signature = Signature(spec, described, flags)
            known = (len(self._numbers), signature, *signature.offsets())
            self._numbers[spec, described, flags] = known
            spec_bytes = signature.to_bytes()
        number, _, starts, size = known
        values = [v for v in leaves if not is_tensor(v)]
        value_bytes = pickle.dumps(values) if values else b""
        at = FRONT_BYTES + HEADER_BYTES
        body = -(-(at + len(spec_bytes) + len(value_bytes)) // ALIGN) * ALIGN
        buffer = torch.empty(body + size, dtype=torch.uint8)
        view = buffer.numpy().data
        window, i = key
        fields = (_KIND_NUMBER[i.kind], i.stage, i.job, i.batch, *i.span, number, len(spec_bytes), len(value_bytes))
        _HEADER.pack_into(view, FRONT_BYTES, _MAGIC, window, sent, *fields)
        view[at : at + len(spec_bytes) + len(value_bytes)] = spec_bytes + value_bytes
        tensors = [t for t in leaves if is_tensor(t)]
        places = [body + start for start, leaf in zip(starts, described, strict=True) if leaf is not None]
        return buffer, tensors, places


def fill(buffer: torch.Tensor, tensors: list[torch.Tensor], places: list[int]) -> None:
    """Copies the tensors to their places in the buffer."""
    for tensor, at in zip(tensors, places, strict=True):
        size = tensor.numel() * tensor.dtype.itemsize
        if size:
            buffer[at : at + size].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach(), non_blocking=True)


class Decoder:
    """The receiving end of one channel."""

    def __init__(self) -> None:
        self._signatures: dict[int, Signature] = {}

    def decode(self, buffer: torch.Tensor, posted: int, arrived: int) -> Message:
        """The message in a byte tensor; its tensors are views of it.

        Raises:
            PipelineError: the bytes are no message of this version.
        """
        view = buffer.numpy().data
        magic, window, sent, kind, stage, job, batch, start, stop, number, n_spec, n_values = _HEADER.unpack_from(
            view, FRONT_BYTES
        )
        if magic != _MAGIC:
            raise PipelineError(f"received {bytes(magic)!r} instead of a message: do all ranks run the same version?")
        at = FRONT_BYTES + HEADER_BYTES
        if n_spec:
            self._signatures[number] = Signature.from_bytes(view[at : at + n_spec])
            at += n_spec
        signature = self._signatures[number]
        values = iter(pickle.loads(view[at : at + n_values]) if n_values else ())
        at = -(-(at + n_values) // ALIGN) * ALIGN
        starts, _ = signature.offsets()
        leaves: list[Any] = []
        for offset, leaf in zip(starts, signature.leaves, strict=True):
            if leaf is None:
                leaves.append(next(values))
                continue
            shape, dtype = leaf
            size = shape.numel() * dtype.itemsize
            data = buffer[at + offset : at + offset + size].view(dtype) if size else torch.empty(0, dtype=dtype)
            leaves.append(data.view(shape))
        tree = leaves[0] if signature.spec is None else pytree.tree_unflatten(leaves, signature.spec)
        key = (window, Instruction(KINDS[kind], stage, job, batch, Span(start, stop)))
        return Message(key, tree, signature.flags, sent, posted, arrived, buffer.numel())
