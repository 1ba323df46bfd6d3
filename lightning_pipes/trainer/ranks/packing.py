"""Objects as bytes that can be sent: tensors are copied once at each end."""

from __future__ import annotations

import pickle
import struct
from typing import Any

import torch

from lightning_pipes.engine.watch.trust import Seal, dumps, loads

_NUMBER = struct.Struct("<q")


class Packed:
    """An object, ready to be written; its tensors arrive as plain tensors on the CPU.

    Args:
        seal: authenticates the object to its receivers, but not the contents of tensors.
    """

    def __init__(self, thing: Any, seal: Seal | None) -> None:
        buffers: list[pickle.PickleBuffer] = []
        parts = [memoryview(dumps(thing, seal, buffers.append)), *(buffer.raw() for buffer in buffers)]
        lengths = [len(parts), *(part.nbytes for part in parts)]
        self.parts = [memoryview(struct.pack(f"<{len(lengths)}q", *lengths)), *parts]
        """Its bytes, one part after another."""
        self.size = sum(part.nbytes for part in self.parts)
        """In bytes."""

    def write(self, into: torch.Tensor) -> None:
        """Fill the first `size` bytes of a tensor of bytes."""
        view, at = into.numpy().data, 0
        for part in self.parts:
            view[at : at + part.nbytes] = part
            at += part.nbytes


def unpacked(data: memoryview, seal: Seal | None) -> Any:
    """Return the object at the beginning of these writable bytes; it shares no memory with them.

    Raises:
        PipelineError: the sender is not trusted.
    """
    (count,) = _NUMBER.unpack_from(data)
    parts, at = [], _NUMBER.size * (count + 1)
    for length in struct.unpack_from(f"<{count}q", data, _NUMBER.size):
        parts.append(data[at : at + length])
        at += length
    return loads(parts[0], seal, parts[1:])
