"""Memory of any CUDA device, as torch reports it."""

from __future__ import annotations

from typing import ClassVar

import torch

from lightning_pipes.engine.monitor.source import Source, SourceError


class CudaSource(Source):
    """Memory: free bytes of the device, and bytes that torch holds in this process."""

    name: ClassVar[str] = "torch.cuda"
    metrics = ("gpu.torch_free_bytes", "gpu.torch_allocated_bytes", "gpu.torch_reserved_bytes")

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def open(self) -> None:
        if self._device.type != "cuda":
            raise SourceError("this rank computes on no CUDA device")

    def read(self) -> list[float]:
        device = self._device
        free, _ = torch.cuda.mem_get_info(device)
        return [float(free), float(torch.cuda.memory_allocated(device)), float(torch.cuda.memory_reserved(device))]
