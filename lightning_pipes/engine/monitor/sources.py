"""The sources of numbers about a rank's device, the most informative first."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from lightning_pipes.engine.monitor.host import host_sources
from lightning_pipes.engine.monitor.nvidia import CudaSource, GpmSource, NvmlSource, uuid_of
from lightning_pipes.engine.monitor.source import Source


def sources_for(device: torch.device) -> Sequence[Source]:
    """Return sources about `device` and the machine, for the calling thread: hardware counters, the driver's numbers,
    torch's, and Linux's. An unavailable source raises when it is opened."""
    uuid = uuid_of(device.index or 0) if device.type == "cuda" else None
    return [GpmSource(uuid), NvmlSource(uuid), CudaSource(device), *host_sources(threading.get_native_id())]


def free_metrics(device: torch.device) -> Sequence[str]:
    """Return the metrics of free bytes on `device`, the best first; the machine's only for a CPU."""
    return ("host.available_bytes",) if device.type == "cpu" else ("gpu.free_bytes", "gpu.torch_free_bytes")
