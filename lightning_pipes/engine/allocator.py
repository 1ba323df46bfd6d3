"""The C library's allocator: memory that the process does not need goes back to the system."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache


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
