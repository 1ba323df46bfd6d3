"""The memory of this process: its peak, and settings of glibc's allocator that keep or return free memory."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

STATUS_PATH = Path("/proc/self/status")
"""The file in which Linux reports the memory of the process that reads it."""
KEEP_HEAP_VARIABLE = "LIGHTNING_PIPES_KEEP_HEAP"
"""The name of the environment variable that prevents all changes of the allocator's settings if it is 0."""
VARIABLES_OF_GLIBC = (
    "GLIBC_TUNABLES",
    "MALLOC_ARENA_MAX",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
)
"""The environment variables with which users set the same options of glibc. If one is set, no option is changed."""
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
"""The numbers of glibc's options, from malloc.h."""
_KEEPING_OPTIONS = {_MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: (2 << 30) - 1, _TOP_PAD: 64 << 20}
"""The options, in bytes, that keep free memory in the heap.

Blocks up to the first size, which is the maximum that glibc accepts, are allocated in the heap. Up to the second size,
free memory stays at the end of the heap. The heap grows by steps of the third size.
"""
_DEFAULT_OPTIONS = {_MMAP_THRESHOLD: 32 << 20, _TRIM_THRESHOLD: 64 << 20, _TOP_PAD: 128 << 10}
"""The options, in bytes, that glibc chooses automatically after a process has freed a block of 32 MiB."""


def release_free_memory() -> None:
    """Collect garbage and return free memory to the system, except inside `kept_heap`.

    Memory is returned only if glibc is the allocator.
    """
    if not _heaps_kept:
        gc.collect()
        trim_heap()


def trim_heap(kept: bool = False) -> None:
    """Return free memory to the system if glibc is the allocator. This takes milliseconds.

    Args:
        kept: whether this is also done inside `kept_heap`, after work that needs blocks of other sizes than a step.
            Otherwise, such blocks would fragment the heap, so that it grows each time.
    """
    libc = load_libc()
    if libc is not None and (not _heaps_kept or (kept and can_set_options())):
        libc.malloc_trim(0)


@contextmanager
def trimmed_heap() -> Iterator[None]:
    """Return free memory to the system before and after the block, which needs blocks of other sizes than a step."""
    trim_heap()
    try:
        yield
    finally:
        trim_heap()


_heaps_kept = 0
"""The number of open `kept_heap` blocks."""


def share_heap() -> None:
    """Make all threads that are started from now on allocate memory from the same heap, if glibc is the allocator.

    By default each thread has a heap of its own, although the threads of a job array compute one at a time. A thread
    keeps the heap that it has, so this function must be called before threads are started.
    """
    _set_options({_ARENA_MAX: 1})


@contextmanager
def kept_heap() -> Iterator[None]:
    """Keep free memory in the heap inside the block, and return it to the system at the end.

    By default, a thread that frees the last block of its heap returns the memory to the system at once. The next batch
    would then touch the memory for the first time again, with a page fault for every 4 KiB.
    """
    global _heaps_kept
    share_heap()
    _set_options(_KEEPING_OPTIONS)
    _heaps_kept += 1
    try:
        yield
    finally:
        _heaps_kept -= 1
        if not _heaps_kept and _set_options(_DEFAULT_OPTIONS):
            release_free_memory()


def _set_options(options: dict[int, int]) -> bool:
    """Set options of glibc's allocator unless the user has set them, and return whether they were set."""
    libc = load_libc()
    if libc is None or not can_set_options():
        return False
    for option, value in options.items():
        libc.mallopt(option, value)
    return True


def can_set_options() -> bool:
    """Return whether glibc allocates memory and the user has set none of its options."""
    given = any(os.environ.get(name) for name in VARIABLES_OF_GLIBC[1:]) or "glibc.malloc" in os.environ.get(
        VARIABLES_OF_GLIBC[0], ""
    )
    return load_libc() is not None and not given and os.environ.get(KEEP_HEAP_VARIABLE) != "0"


@cache
def load_libc() -> ctypes.CDLL | None:
    """Return glibc with `malloc_trim` and `mallopt`.

    The result is None for other C libraries, such as musl, and if another library, such as jemalloc or tcmalloc,
    allocates memory.
    """
    libc = ctypes.CDLL(None)
    if not all(hasattr(libc, name) for name in ("gnu_get_libc_version", "malloc_trim", "mallopt")):
        return None
    return libc if find_library("malloc") == find_library("gnu_get_libc_version") else None


class _Found(ctypes.Structure):
    """The result of `dladdr`, as defined in dlfcn.h."""

    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("at", ctypes.c_void_p),
    ]


def find_library(function: str) -> str:
    """Return the file of the library that contains a C function, or an empty string if it can't be found."""
    symbols, found = ctypes.CDLL(None), _Found()
    if not (hasattr(symbols, "dladdr") and hasattr(symbols, function)):
        return ""
    address = ctypes.cast(getattr(symbols, function), ctypes.c_void_p)
    known = symbols.dladdr(address, ctypes.byref(found))
    return os.fsdecode(found.file) if known and found.file else ""


def read_status_bytes(field: str) -> int | None:
    """Return a number of bytes that Linux reports for this process, such as VmHWM or VmRSS; None on other systems."""
    try:
        lines = STATUS_PATH.read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), None)


_BYTES_AT_IMPORT = read_status_bytes("VmRSS") or 0
"""The bytes of this process when this module was imported, after torch and Lightning."""


def read_peak_bytes(device: torch.device) -> int | None:
    """Return the peak memory of this process in bytes, or None if it is not measured.

    On a GPU, this is the peak of torch's allocator. On the CPU, it is the peak of resident memory minus the memory
    after imports. A process that was forked after the imports shares most of that memory, so its peak may never exceed
    it; the result is None in this case.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = read_status_bytes("VmHWM") if device.type == "cpu" else None
    return None if peak is None or peak <= _BYTES_AT_IMPORT else peak - _BYTES_AT_IMPORT
