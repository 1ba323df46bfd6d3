"""How a process ends that has given up waiting for others.

gloo's threads sit on a collective that was given up until its time is up, half an hour later. Who destroys its group
waits for them, and the end of the interpreter destroys all objects.
"""

from __future__ import annotations

import ctypes
import gc
import io
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress

_LOOK_SECONDS = 0.2
_given_up = threading.Event()
_waits = threading.Lock()


def give_up() -> None:
    """There may be collectives that do not end."""
    _given_up.set()


def has_given_up() -> bool:
    """Whether there may be."""
    return _given_up.is_set()


def waits_first() -> bool:
    """Whether nobody else has asked this before: one is enough to wait for the main thread's end."""
    return _waits.acquire(blocking=False)


def wait_for_main_thread() -> None:
    """Returns when there is nothing left to do but what comes at the end of an interpreter."""
    while threading.main_thread().is_alive():  # `join` would take part in how the interpreter ends it
        time.sleep(_LOOK_SECONDS)


def never_destroy(things: Iterable[object]) -> None:
    """The things outlive the interpreter, which ends in order otherwise: what is printed, written and its exit status
    are its own. Then the process ends at once, where the C library is GNU's; elsewhere it waits for no thread, either.
    """
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        if hasattr(library, "on_exit"):
            library.on_exit(library._exit, None)


def hurry() -> None:
    """The interpreter ends without looking for garbage once more, which takes seconds on a busy machine, while other
    ranks, or who starts them anew, wait for this one. Files that would have been closed then are written to now."""
    for thing in gc.get_objects():
        if issubclass(type(thing), io.IOBase):
            with suppress(Exception):  # whatever kind of file it is
                thing.flush()
    gc.freeze()
