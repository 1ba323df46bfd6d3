"""Measures the bytes of the tensors that are alive inside a block."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lightning_pipes.engine.compute.reducer import local_part
from lightning_pipes.engine.private_torch import (
    TorchDispatchMode,
    allow_transforms,
    has_storage,
    storage_address,
)
from lightning_pipes.engine.trees import tensors_in


class MemoryFootprint:
    """The bytes of the tensors that were created inside a block."""

    def __init__(self) -> None:
        self._peak = self._left = 0

    @property
    def peak_bytes(self) -> int:
        """The maximum of the live bytes since the start of the block, or since the last call of `reset_peak`."""
        return self._peak

    @property
    def live_bytes(self) -> int:
        """The bytes of the tensors that are alive now."""
        return self._left

    def reset_peak(self) -> None:
        """Start to measure a new peak."""
        self._peak = self._left

    def add(self, size: int) -> None:
        """Count allocated bytes. A negative number stands for freed bytes."""
        self._left += size
        self._peak = max(self._peak, self._left)


class _CudaFootprint(MemoryFootprint):
    """The bytes that the CUDA allocator reports."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        torch.cuda.synchronize(device)
        self._before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)

    @property
    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self._device)) - self._before

    @property
    def live_bytes(self) -> int:
        return int(torch.cuda.memory_allocated(self._device)) - self._before

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


class _StorageCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations create on the CPU, until the last tensor of each storage is freed."""

    def __init__(self, footprint: MemoryFootprint) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._footprint = footprint
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {storage_of(t) for t in tensors_in((args, kwargs))}
        for tensor in tensors_in(out):
            if tensor.device.type == "cpu" and storage_of(tensor) not in given:
                self._add(tensor)
        return out

    def _add(self, tensor: torch.Tensor) -> None:
        key, size = storage_of(tensor)
        if not size or key in self._seen:
            return
        footprint, seen = self._footprint, self._seen

        def on_freed(_: object) -> None:
            seen.pop(key, None)
            footprint.add(-size)

        seen[key] = weakref.ref(tensor.untyped_storage(), on_freed)
        footprint.add(size)


def count_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's values. For a sparse COO tensor, the bytes of its indices are included.

    Tensors of other layouts count as if they were dense.
    """
    if tensor.layout is torch.sparse_coo:
        coalesced = tensor.detach().coalesce()
        return coalesced.indices().nbytes + coalesced.values().nbytes
    return tensor.numel() * tensor.element_size()


@contextmanager
def saved_for_backward() -> Iterator[dict[tuple[int, int], torch.Tensor]]:
    """Yield a dictionary that collects one tensor of every storage that autograd saves inside the block.

    The keys are the results of `storage_of`. The dictionary keeps the tensors alive, so that no later storage has the
    same address. Tensors that are saved inside transforms of torch.func are not included.
    """
    found: dict[tuple[int, int], torch.Tensor] = {}

    def keep_alias(tensor: torch.Tensor) -> torch.Tensor:
        # A tensor with a graph would keep this function alive, in a reference cycle that is never collected.
        alias = tensor.detach()
        found.setdefault(storage_of(tensor), alias)
        return alias

    with torch.autograd.graph.saved_tensors_hooks(keep_alias, lambda tensor: tensor), allow_transforms():
        yield found


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address and the bytes of a tensor's storage; (0, 0) for a tensor without storage."""
    tensor = torch.func.debug_unwrap(tensor)
    if not has_storage(tensor):
        return 0, 0
    tensor = local_part(tensor)
    return storage_address(tensor), tensor.untyped_storage().nbytes()


@contextmanager
def measure_footprint(device: torch.device) -> Iterator[MemoryFootprint]:
    """Measure the bytes of the tensors that this thread creates inside the block.

    On a GPU, the numbers come from the CUDA allocator. On the CPU, every storage is counted, which slows each operation
    down.
    """
    if device.type == "cuda":
        yield _CudaFootprint(device)
        return
    found = MemoryFootprint()
    with _StorageCounter(found):
        yield found
