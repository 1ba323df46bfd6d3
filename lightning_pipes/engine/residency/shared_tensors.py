"""Tensors that several trainings in one process have in common, such as a frozen base with different adapters.

Equal tensors exist once, as copies on write of torch: an operation that writes to one of them first gives it separate
memory. A write therefore never reaches another training, no matter how it is made, and it is visible afterwards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from lightning_pipes.engine.private_torch import is_copy_on_write, make_copy_on_write

MIN_SHARED_BYTES = 4096
"""The smallest tensor that is shared. Smaller ones, such as statistics of batch norms, are not worth a comparison."""


@dataclass(eq=False)
class _Entry:
    """A value that trainings share.

    Attributes:
        value: a tensor with this value, which nobody writes.
        owners: the trainings that have a tensor with this value.
    """

    value: torch.Tensor
    owners: set[int] = field(default_factory=set)


class SharedTensors:
    """The tensors that do not train, of several trainings, each distinct value once.

    shared.share(index, {name: tensor, ...})    # after the weights of a training have values
    shared.renew(index)                         # from time to time, between two of its steps
    shared.release(index)
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, list[_Entry]] = defaultdict(list)
        """The values by their shape, dtype, device and checksum."""
        self._by_source: dict[Hashable, _Entry] = {}
        """The values that were read from files, by the source, dtype and device."""
        self._held: dict[int, dict[str, tuple[torch.Tensor, _Entry]]] = {}
        """The tensors of each training by name."""

    @property
    def nbytes(self) -> int:
        """The bytes of all values, each counted once."""
        return sum(entry.value.nbytes for entries in self._entries.values() for entry in entries)

    def find(self, source: Hashable, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        """Return a tensor with the value that an earlier training has read from `source`, or None.

        Args:
            source: identifies the content of the files, not only their names.
            dtype: the dtype of the tensor.
            device: the device of the tensor.
        """
        entry = self._by_source.get((source, dtype, device))
        return None if entry is None else make_copy_on_write(entry.value)

    def share(self, owner: int, tensors: Mapping[str, torch.Tensor], sources: Mapping[int, Hashable] = {}) -> None:
        """Let a training use the memory of equal tensors of other trainings. Its tensors stay the same objects.

        Values that no training uses any more are forgotten.

        Args:
            owner: the number of the training. Its earlier tensors are released.
            tensors: its parameters and buffers by name. Those that train, small ones, tensors of subclasses, and memory
                that torch has not allocated are skipped.
            sources: the file entries of tensors that were read from files, by the id of the tensor.
        """
        self.release(owner)
        held = self._held[owner] = {}
        for name, tensor in tensors.items():
            if not _is_sharable(tensor):
                continue
            entry = self._find_equal(tensor)
            if entry is None:
                continue
            entry.owners.add(owner)
            held[name] = tensor, entry
            if id(tensor) in sources:
                self._by_source[sources[id(tensor)], tensor.dtype, tensor.device] = entry
        self._forget_unused()

    def renew(self, owner: int) -> list[str]:
        """Release memory that tensors of a training no longer share although their values are still equal.

        Reading a tensor as a NumPy array or saving it to a file separates its memory.

        Returns:
            The names of tensors with changed values. They are not shared any more.
        """
        held, changed = self._held.get(owner, {}), []
        for name, (tensor, entry) in list(held.items()):
            if is_copy_on_write(tensor):
                continue
            if _has_equal_layout(tensor, entry.value) and _equal_bytes(tensor, entry.value):
                tensor.data = make_copy_on_write(entry.value)
            else:
                changed.append(name)
                entry.owners.discard(owner)
                del held[name]
        return changed

    def release(self, owner: int) -> None:
        """Stop counting the tensors of a training, which keep their values."""
        for _, entry in self._held.pop(owner, {}).values():
            entry.owners.discard(owner)

    def _find_equal(self, tensor: torch.Tensor) -> _Entry | None:
        """Return the entry with the value of a tensor, which uses its memory afterwards. If there is none, make one.

        The result is None if torch has not allocated the memory of the tensor, for example if it is a mapped file.
        """
        value = tensor.detach()
        checksum = torch.hash_tensor(_words(value)).view(torch.int64).item()
        entries = self._entries[value.shape, value.dtype, value.device, checksum]
        for entry in entries:
            if _equal_bytes(value, entry.value):
                tensor.data = make_copy_on_write(entry.value)
                return entry
        try:
            entries.append(_Entry(make_copy_on_write(value)))
        except RuntimeError:
            return None
        return entries[-1]

    def _forget_unused(self) -> None:
        for key, entries in list(self._entries.items()):
            entries[:] = [entry for entry in entries if entry.owners]
            if not entries:
                del self._entries[key]
        self._by_source = {key: entry for key, entry in self._by_source.items() if entry.owners}


def _is_sharable(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and not tensor.requires_grad
        and tensor.device.type != "meta"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and MIN_SHARED_BYTES <= tensor.nbytes == tensor.untyped_storage().nbytes()
    )


def _has_equal_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape, strides, dtype and device, and memory for their values."""
    layouts = [(t.shape, t.stride(), t.dtype, t.device, t.untyped_storage().nbytes()) for t in (one, other)]
    return layouts[0] == layouts[1]


def _equal_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two contiguous tensors have the same bits, so that NaN and the sign of 0 count."""
    return torch.equal(_words(one), _words(other))


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as integers that are as large as its length allows."""
    dtype = next(each for each in (torch.int64, torch.int32, torch.uint8) if tensor.nbytes % each.itemsize == 0)
    return tensor.detach().view(-1).view(dtype)
