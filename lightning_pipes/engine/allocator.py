"""Memory of this process: its peak, and the C library's allocator, which gives back what the process does not need."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")
"""The file in which Linux counts the memory of the process that reads it."""
VARIABLE = "LIGHTNING_PIPES_KEEP_HEAP"
"""The environment variable that leaves the allocator alone where it is 0."""
VARIABLES_OF_GLIBC = (
    "GLIBC_TUNABLES",
    "MALLOC_ARENA_MAX",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
)
"""The environment variables by which the user sets the same options; then they stay."""
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
"""The numbers of glibc's options, from malloc.h."""
_KEEPING = {_MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: (2 << 30) - 1, _TOP_PAD: 64 << 20}
"""Bytes: blocks up to the first are in the heap, the most that glibc takes; up to the second stay free at its end."""
_USUAL = {_MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: 64 << 20, _TOP_PAD: 128 << 10}
"""The settings that glibc adapts to by itself once a process has freed a block of 32 MiB."""


def release_free_memory() -> None:
    """Collect garbage and give free memory back to the system, where glibc allocates it; nothing in `kept_heap`."""
    if not _heaps_kept:
        gc.collect()
        trim_heap()


def trim_heap() -> None:
    """Give free memory back to the system, where glibc allocates it; nothing in `kept_heap`. Takes milliseconds."""
    libc = load_libc()
    if libc is not None and not _heaps_kept:
        libc.malloc_trim(0)


@contextmanager
def trimmed_heap() -> Iterator[None]:
    """Give free memory back to the system before and after the block, which takes blocks of other sizes than a step."""
    trim_heap()
    try:
        yield
    finally:
        trim_heap()


_heaps_kept = 0
"""The blocks of `kept_heap` that are open."""


def share_heap() -> None:
    """Have all threads that start from now on allocate from one heap, where glibc allocates.

    Each thread would otherwise get a heap of its own, and the threads of a job array compute one at a time. A thread
    keeps the heap that it has, so this is called before threads are started.
    """
    _set_options({_ARENA_MAX: 1})


@contextmanager
def kept_heap() -> Iterator[None]:
    """Keep free memory in the heap while the block runs, and give it back to the system in the end.

    A thread that frees the last block of its heap otherwise returns the memory at once, and the next batch touches it
    for the first time again: a page fault for every 4 KiB.
    """
    global _heaps_kept
    share_heap()
    _set_options(_KEEPING)
    _heaps_kept += 1
    try:
        yield
    finally:
        _heaps_kept -= 1
        if not _heaps_kept and _set_options(_USUAL):
            release_free_memory()


def describe_allocator() -> str:
    """Return the library that allocates memory in this process, and whether arrays have one heap."""
    name = Path(_find_library("malloc")).name
    if not _can_set_options():
        return name
    return f"{name}, one heap in arrays"


def _set_options(options: dict[int, int]) -> bool:
    """Set options of glibc's allocator, unless the user does; return whether they were set."""
    libc = load_libc()
    if libc is None or not _can_set_options():
        return False
    for option, value in options.items():
        libc.mallopt(option, value)
    return True


def _can_set_options() -> bool:
    given = any(os.environ.get(name) for name in VARIABLES_OF_GLIBC[1:]) or "glibc.malloc" in os.environ.get(
        VARIABLES_OF_GLIBC[0], ""
    )
    return load_libc() is not None and not given and os.environ.get(VARIABLE) != "0"


@cache
def load_libc() -> ctypes.CDLL | None:
    """Return glibc with `malloc_trim` and `mallopt`.

    None for other C libraries, such as musl, and where another library allocates, such as jemalloc or tcmalloc.
    """
    libc = ctypes.CDLL(None)
    if not all(hasattr(libc, name) for name in ("gnu_get_libc_version", "malloc_trim", "mallopt")):
        return None
    return libc if _find_library("malloc") == _find_library("gnu_get_libc_version") else None


class _Found(ctypes.Structure):
    """The result of `dladdr`, as in dlfcn.h."""

    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("at", ctypes.c_void_p),
    ]


def _find_library(function: str) -> str:
    """Return the file of the library that a C function is in; nothing where it can't be found."""
    symbols, found = ctypes.CDLL(None), _Found()
    if not (hasattr(symbols, "dladdr") and hasattr(symbols, function)):
        return ""
    address = ctypes.cast(getattr(symbols, function), ctypes.c_void_p)
    known = symbols.dladdr(address, ctypes.byref(found))
    return os.fsdecode(found.file) if known and found.file else ""


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

    On a GPU they are those of torch's allocator. On the CPU they are resident memory beyond what imports have taken; a
    process that was forked after these shares most of it, so it may never have had more.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = read_status_bytes("VmHWM") if device.type == "cpu" else None
    return None if peak is None or peak <= _IMPORTED else peak - _IMPORTED
