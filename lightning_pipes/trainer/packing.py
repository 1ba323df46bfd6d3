"""Objects as bytes that can be sent: tensors are copied once at each end."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch


class Packed:
    """An object, ready to be written; its tensors arrive as plain tensors on the CPU."""

    def __init__(self, thing: Any) -> None:
        self._buffers: list[pickle.PickleBuffer] = []
        stream = io.BytesIO()
        _Pickler(stream, pickle.HIGHEST_PROTOCOL, buffer_callback=self._buffers.append).dump(thing)
        parts = [stream.getbuffer(), *(buffer.raw() for buffer in self._buffers)]
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


def unpacked(data: torch.Tensor) -> Any:
    """The object that was written; nothing of it shares memory with `data`."""
    count = int(data[:8].clone().view(torch.int64))
    lengths = data[8 : 8 * (count + 1)].clone().view(torch.int64).tolist()
    view = data.numpy().data
    parts, at = [], 8 * (count + 1)
    for length in lengths:
        parts.append(view[at : at + length])
        at += length
    return pickle.loads(parts[0], buffers=parts[1:])


class _Pickler(pickle.Pickler):
    """Puts tensors aside; a view drags no larger storage along."""

    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, torch.Tensor):
            return NotImplemented
        plain = thing.detach().cpu()
        if type(plain) is not torch.Tensor or plain.layout != torch.strided or plain.is_quantized:
            return plain.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
        plain = plain.resolve_conj().resolve_neg()
        if plain.untyped_storage().nbytes() != plain.numel() * plain.element_size():
            plain = plain.clone()
        data = torch.empty(0, dtype=torch.uint8).set_(plain.untyped_storage())
        return _tensor, (pickle.PickleBuffer(data.numpy().data), plain.dtype, tuple(plain.shape), plain.stride())


def _tensor(buffer: Any, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    if not memoryview(buffer).nbytes:
        return torch.empty(shape, dtype=dtype)
    data = torch.frombuffer(buffer, dtype=torch.uint8).clone()
    return torch.empty(0, dtype=dtype).set_(data.untyped_storage(), 0, shape, stride)
