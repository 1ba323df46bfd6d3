"""Memory of this process: its peak, and the C library's allocator, which gives back what the process does not need."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")
"""The file in which Linux counts the memory of the process that reads it."""


def release_free_memory() -> None:
    """Collect garbage and give free memory back to the system, where the C library is glibc."""
    gc.collect()
    trim_heap()


def trim_heap() -> None:
    """Give free memory back to the system, where the C library is glibc; takes some milliseconds."""
    libc = load_libc()
    if libc is not None:
        libc.malloc_trim(0)


@contextmanager
def trimmed_heap() -> Iterator[None]:
    """Give free memory back to the system before and after the block, which takes blocks of other sizes than a step."""
    trim_heap()
    try:
        yield
    finally:
        trim_heap()


@cache
def load_libc() -> ctypes.CDLL | None:
    """Return glibc with `malloc_trim` and `mallopt`; None for other C libraries, such as musl."""
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") and hasattr(libc, "malloc_trim") else None


def read_status_bytes(field: str) -> int | None:
    """Return the bytes that Linux counts for this process, such as VmHWM or VmRSS; None on other systems."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), None)


_IMPORTED = read_status_bytes("VmRSS") or 0
"""Bytes that this process had when this module was imported: after torch and Lightning."""


def read_peak_bytes(device: torch.device) -> int | None:
    """Return the bytes that this process has needed at most; None where nothing counts them.

    On a GPU they are those of torch's allocator. On the CPU they are resident memory beyond what imports have taken.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = read_status_bytes("VmHWM") if device.type == "cpu" else None
    return None if peak is None else max(0, peak - _IMPORTED)
