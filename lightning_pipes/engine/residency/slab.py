"""Slabs: pieces of memory with many tensors, which a single copy moves."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

SLAB_ALIGNMENT_BYTES = 512
"""The alignment of tensors in a slab, in bytes.

The allocators of torch use the same alignment, so that kernels choose the same code.
"""


class _Slice(NamedTuple):
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class SlabLayout:
    """The places of tensors in a slab.

    Attributes:
        places: the place of each tensor, by name.
        nbytes: the bytes of the slab.
    """

    places: dict[str, _Slice]
    nbytes: int

    @staticmethod
    def from_tensors(tensors: Mapping[str, torch.Tensor]) -> SlabLayout:
        """Return a layout with one tensor after the other. The strides of tensors without holes are kept."""
        places, offset = {}, 0
        for name, tensor in tensors.items():
            nbytes = tensor.numel() * tensor.element_size()
            stride = torch.empty_like(tensor, device="meta").stride()
            places[name] = _Slice(offset, nbytes, tensor.dtype, tuple(tensor.shape), stride)
            offset += -(-nbytes // SLAB_ALIGNMENT_BYTES) * SLAB_ALIGNMENT_BYTES
        return SlabLayout(places, offset)

    def view_tensors(self, slab: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors in a slab.

        They share the version counter of the slab, so that autograd detects when the slab is overwritten.
        """
        return {
            name: slab[at.offset : at.offset + at.nbytes].view(at.dtype).as_strided(at.shape, at.stride)
            if at.nbytes
            else torch.empty(at.shape, dtype=at.dtype, device=slab.device)
            for name, at in self.places.items()
        }


@dataclass(eq=False)
class DeviceSlab:
    """A slab on the device.

    Attributes:
        slab: the memory.
        used: the ticket of the last computation that used the slab, or its memory before the slab was allocated.
        copies: the tickets of the last copies to the slab and from it.
        is_lost: whether other states must not use the slab.
    """

    slab: torch.Tensor
    used: int | None
    copies: list[int] = field(default_factory=list)
    is_lost: bool = False

    @property
    def pending_tickets(self) -> list[int]:
        """The tickets of operations that must end before the slab is overwritten."""
        return self.copies if self.used is None else [*self.copies, self.used]


def host_slab(nbytes: int, pinned: bool) -> torch.Tensor:
    """Return a slab on the host.

    Pinned memory is registered in place, because torch's own allocator would round its size up to a power of two.
    """
    slab = torch.empty(nbytes, dtype=torch.uint8)
    if pinned and nbytes:
        runtime, address = torch.cuda.cudart(), slab.data_ptr()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(int(runtime.cudaHostRegister(address, nbytes, 0)))
        weakref.finalize(slab, runtime.cudaHostUnregister, address)
    return slab
