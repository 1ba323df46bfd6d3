"""Many tensors in one piece of memory, which a single copy moves."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

ALIGNMENT = 512
"""Bytes; where the allocators of torch start tensors, too, so that kernels choose the same code."""


class _Slice(NamedTuple):
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class SlabLayout:
    """The place of each tensor in a slab.

    Attributes:
        nbytes: of the slab.
    """

    places: dict[str, _Slice]
    nbytes: int

    @staticmethod
    def from_tensors(tensors: Mapping[str, torch.Tensor]) -> SlabLayout:
        """Lay out one tensor after the other; strides are kept where a tensor has no holes."""
        places, offset = {}, 0
        for name, tensor in tensors.items():
            nbytes = tensor.numel() * tensor.element_size()
            stride = torch.empty_like(tensor, device="meta").stride()
            places[name] = _Slice(offset, nbytes, tensor.dtype, tuple(tensor.shape), stride)
            offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return SlabLayout(places, offset)

    def view_tensors(self, slab: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors in a slab. They share its version counter, so that autograd notices when it is
        overwritten."""
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
        copies: tickets of the last copies from it and to it.
        used: the ticket of the last computation with it, or with its memory before.
        is_lost: whether other states must not use it.
    """

    slab: torch.Tensor
    used: int | None
    copies: list[int] = field(default_factory=list)
    is_lost: bool = False

    @property
    def pending_tickets(self) -> list[int]:
        """Tickets of operations that must end before the slab is overwritten."""
        return self.copies if self.used is None else [*self.copies, self.used]


def host_slab(nbytes: int, pinned: bool) -> torch.Tensor:
    """Return bytes on the host. Pinned ones are registered in place, because torch's own allocator would round up to a
    power of two."""
    slab = torch.empty(nbytes, dtype=torch.uint8)
    if pinned and nbytes:
        runtime, address = torch.cuda.cudart(), slab.data_ptr()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(int(runtime.cudaHostRegister(address, nbytes, 0)))
        weakref.finalize(slab, runtime.cudaHostUnregister, address)
    return slab
