"""One message as bytes: a fixed header, what its leaves are, and the tensors themselves.

gloo checks neither size nor order, so everything that a receiver must know travels along and is checked. The
structure of the tree is pickled once per channel and signature, and named by number afterwards.
"""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass
from functools import cached_property
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
_EXTRA = FRONT_BYTES + HEADER_BYTES


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

    @cached_property
    def starts(self) -> list[int]:
        """Where each tensor starts among the tensors' bytes."""
        return self._layout[0]

    @cached_property
    def bytes(self) -> int:
        """What the tensors take."""
        return self._layout[1]

    @cached_property
    def _layout(self) -> tuple[list[int], int]:
        at, starts = 0, []
        for shape, dtype in filter(None, self.leaves):
            starts.append(at)
            at += -(-shape.numel() * dtype.itemsize // ALIGN) * ALIGN
        return starts, at


class Encoder:
    """The sending end of one channel."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[int, Signature]] = {}

    def encode(
        self, key: tuple[int, Instruction], tree: Any, flags: tuple[bool, ...], sent: int
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[int]]:
        """A byte tensor with everything but the tensors' contents filled in, the tensors, and where each belongs.

        Its first FRONT_BYTES are left free.
        """
        if isinstance(tree, torch.Tensor):  # by far the most common, and worth a short way
            leaves, spec, described = [tree], None, ((tree.shape, tree.dtype),)
            tensors, values = leaves, b""
        else:
            leaves, spec = pytree.tree_flatten(tree)
            described = tuple((t.shape, t.dtype) if isinstance(t, torch.Tensor) else None for t in leaves)
            tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
            plain = [v for v in leaves if not isinstance(v, torch.Tensor)]
            values = pickle.dumps(plain) if plain else b""
        known = self._known.get((spec, described, flags))
        extra = values
        spec_size = 0
        if known is None:
            signature = Signature(spec, described, flags)
            known = self._known[spec, described, flags] = (len(self._known), signature)
            spec_bytes = signature.to_bytes()
            spec_size, extra = len(spec_bytes), spec_bytes + values
        number, signature = known
        body = -(-(_EXTRA + len(extra)) // ALIGN) * ALIGN
        buffer = torch.empty(body + signature.bytes, dtype=torch.uint8)
        view = buffer.numpy().data
        window, i = key
        start, stop = i.span
        kind = _KIND_NUMBER[i.kind]
        _HEADER.pack_into(
            view,
            FRONT_BYTES,
            _MAGIC,
            window,
            sent,
            kind,
            i.stage,
            i.job,
            i.batch,
            start,
            stop,
            number,
            spec_size,
            len(values),
        )
        if extra:
            view[_EXTRA : _EXTRA + len(extra)] = extra
        return buffer, tensors, [body + start for start in signature.starts]


def fill(buffer: torch.Tensor, tensors: list[torch.Tensor], places: list[int]) -> None:
    """Copies the tensors to their places in the buffer."""
    for tensor, at in zip(tensors, places, strict=True):
        if tensor.numel():
            _view(buffer, at, tensor.shape, tensor.dtype).copy_(tensor.detach(), non_blocking=True)


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
        at = _EXTRA
        if n_spec:
            self._signatures[number] = Signature.from_bytes(view[at : at + n_spec])
            at += n_spec
        signature = self._signatures[number]
        values = iter(pickle.loads(view[at : at + n_values]) if n_values else ())
        at = -(-(at + n_values) // ALIGN) * ALIGN
        starts = iter(signature.starts)
        leaves = [
            next(values) if leaf is None else _view(buffer, at + next(starts), *leaf) for leaf in signature.leaves
        ]
        tree = leaves[0] if signature.spec is None else pytree.tree_unflatten(leaves, signature.spec)
        key = (window, Instruction(KINDS[kind], stage, job, batch, Span(start, stop)))
        return Message(key, tree, signature.flags, sent, posted, arrived, buffer.numel())


def _view(buffer: torch.Tensor, at: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    size = shape.numel() * dtype.itemsize
    return buffer[at : at + size].view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)
