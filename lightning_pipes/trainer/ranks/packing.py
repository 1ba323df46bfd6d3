"""Objects as bytes that can be sent: tensors are copied once at each end."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from lightning_pipes.engine.watch.trust import Seal, dumps, loads


class Packed:
    """An object, ready to be written; its tensors arrive as plain tensors on the CPU.

    Args:
        seal: of whom the receivers believe; it vouches for what the object is, and not for the contents of tensors.
    """

    def __init__(self, thing: Any, seal: Seal | None) -> None:
        buffers: list[pickle.PickleBuffer] = []
        parts = [memoryview(bytearray(dumps(thing, seal, buffers.append))), *(buffer.raw() for buffer in buffers)]
        lengths = torch.tensor([len(parts), *(part.nbytes for part in parts)], dtype=torch.int64)
        self._parts = [lengths.view(torch.uint8), *(torch.frombuffer(p, dtype=torch.uint8) for p in parts if p.nbytes)]
        self.size = sum(part.numel() for part in self._parts)
        """In bytes."""

    def write(self, into: torch.Tensor) -> None:
        """Fills the first `size` bytes of a tensor of bytes."""
        at = 0
        for part in self._parts:
            into[at : at + part.numel()] = part
            at += part.numel()


def unpacked(data: torch.Tensor, seal: Seal | None) -> Any:
    """The object that was written; nothing of it shares memory with `data`.

    Raises:
        PipelineError: it comes from nobody who may send it.
    """
    count = int(data[:8].clone().view(torch.int64))
    lengths = data[8 : 8 * (count + 1)].clone().view(torch.int64).tolist()
    view = data.numpy().data
    parts, at = [], 8 * (count + 1)
    for length in lengths:
        parts.append(view[at : at + length])
        at += length
    return loads(parts[0], seal, parts[1:])
