"""Copies tensors from the host to a GPU, beside its computation."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree


def record_stream_use(stream: Any, tree: Any) -> None:
    """Register `stream` as a user of the tensors of `tree`, which another stream created.

    The allocator then reuses their memory only after `stream` is done. Otherwise the creating stream could reuse it as
    soon as Python drops them, while queued kernels still read them.
    """
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            leaf.record_stream(stream)


class StageIn:
    """Copies trees of tensors to a device; on the CPU they stay unchanged.

    The computing thread must create it: its stream is the one that will use them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._user = torch.cuda.current_stream(device) if on_gpu else None

    def __call__(self, tree: Any) -> Any:
        """Return `tree` with its tensors on the device, after their arrival."""
        if self._stream is None:
            return tree
        with torch.cuda.stream(self._stream):
            there = pytree.tree_map_only(
                torch.Tensor, lambda t: t.pin_memory().to(self._device, non_blocking=True), tree
            )
        self._stream.synchronize()
        record_stream_use(self._user, there)
        return there
