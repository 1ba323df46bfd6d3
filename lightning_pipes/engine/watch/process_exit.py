"""How a process ends that has given up waiting for others.

gloo's threads sit on a collective that was given up until its time is up, half an hour later. Who destroys its group
waits for them, and the end of the interpreter destroys all objects. And a thread whose call of torch's comes back while
the interpreter ends, as where the other rank ends at the same time, is ended by Python by unwinding it (before 3.14),
which C++ answers with an abort of the process.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import signal
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress

_POLL_SECONDS = 0.2
_MAX_SECONDS = 20
"""For the end of an interpreter, once it has begun."""
_given_up = threading.Event()
_waits = threading.Lock()
_left = threading.Lock()


def give_up() -> None:
    """There may be collectives that do not end."""
    _given_up.set()


def has_given_up() -> bool:
    """Whether there may be."""
    return _given_up.is_set()


def claim_final_wait() -> bool:
    """Whether nobody else has asked this before: one is enough to wait for the main thread's end."""
    return _waits.acquire(blocking=False)


def wait_for_main_thread() -> None:
    """Returns when there is nothing left to do but what comes at the end of an interpreter."""
    while threading.main_thread().is_alive():  # `join` would take part in how the interpreter ends it
        time.sleep(_POLL_SECONDS)


def leak_until_exit(things: Iterable[object]) -> None:
    """The things outlive the interpreter, which ends in order otherwise: what is printed, written and its exit status
    are its own. Then the process ends at once, where the C library is GNU's; elsewhere it waits for no thread, either.
    """
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        if hasattr(library, "on_exit"):
            library.on_exit(library._exit, None)
        _pause_on_terminate(library)


def abandon_thread() -> None:
    """A thread stays behind in a call of torch's that nobody waits for any more: it must not disturb the end."""
    if _left.acquire(blocking=False):
        atexit.register(leak_until_exit, ())


def _pause_on_terminate(library: ctypes.CDLL) -> None:
    """From here on a thread that C++ would answer with an abort waits for the end of the process; and so that this
    never waits for the thread, an alarm ends it then, unless somebody else uses alarms."""
    try:
        set_terminate = ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"]
    except (OSError, AttributeError):  # another C++ library
        return
    if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL and not any(signal.getitimer(signal.ITIMER_REAL)):
        signal.alarm(_MAX_SECONDS)
        set_terminate(library.pause)


def skip_final_gc() -> None:
    """The interpreter ends without looking for garbage once more, which takes seconds on a busy machine, while other
    ranks, or who starts them anew, wait for this one. Files that would have been closed then are written to now."""
    for thing in gc.get_objects():
        if issubclass(type(thing), io.IOBase):
            with suppress(Exception):  # whatever kind of file it is
                thing.flush()
    gc.freeze()
