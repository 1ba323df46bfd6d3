"""Ends a process that has given up waiting for others, and makes calls that may never return.

Gloo's threads wait for an abandoned collective until its timeout, half an hour later. Destroying its group waits for
them, and the end of the interpreter destroys all objects. Also, a thread may return from a call of torch while the
interpreter ends, for example when the other rank ends at the same time. Python (before 3.14) then unwinds the thread,
and C++ aborts the process.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

_POLL_SECONDS = 0.2
_MAX_SECONDS = 20
"""The longest time that the end of an interpreter may take."""
_given_up = threading.Event()
_waits = threading.Lock()
_left = threading.Lock()


def give_up() -> None:
    """Note that there may be collectives that do not end."""
    _given_up.set()


def has_given_up() -> bool:
    """Return whether there may be collectives that do not end."""
    return _given_up.is_set()


def claim_final_wait() -> bool:
    """Return True at the first call only: one thread is enough to wait for the main thread's end."""
    return _waits.acquire(blocking=False)


def wait_for_main_thread() -> None:
    """Wait until only the end of the interpreter is left."""
    while threading.main_thread().is_alive():  # `join` would take part in how the interpreter ends it
        time.sleep(_POLL_SECONDS)


def leak_until_exit(things: Iterable[object]) -> None:
    """Keep the objects alive beyond the interpreter, which otherwise ends in order, with its output and exit status.
    Then the process ends at once, where the C library is GNU's; on other systems it waits for no thread, either."""
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        if hasattr(library, "on_exit"):
            library.on_exit(library._exit, None)
        _pause_on_terminate(library)


def abandon_thread() -> None:
    """Note that a thread stays behind in a call of torch, so that it does not disturb the end."""
    if _left.acquire(blocking=False):
        atexit.register(leak_until_exit, ())


def _pause_on_terminate(library: ctypes.CDLL) -> None:
    """Pause a thread that C++ would abort until the process ends. An alarm bounds that time, unless alarms are already
    in use."""
    try:
        set_terminate = ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"]
    except (OSError, AttributeError):  # another C++ library
        return
    if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL and not any(signal.getitimer(signal.ITIMER_REAL)):
        signal.alarm(_MAX_SECONDS)
        set_terminate(library.pause)


def skip_final_gc() -> None:
    """Skip the final garbage collection, which takes seconds on a busy machine while other ranks or the launcher wait.
    Files that it would have closed are flushed now."""
    for thing in gc.get_objects():
        if issubclass(type(thing), io.IOBase):
            with suppress(Exception):  # whatever kind of file it is
                thing.flush()
    gc.freeze()


T = TypeVar("T")
_CALL_POLL_SECONDS = 0.1


class SerialCaller:
    """Makes calls one after the other, in a thread that the end of the process does not wait for. A `with` block ends
    the thread after the last call."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> SerialCaller:
        return self

    def __exit__(self, *error: object) -> None:
        self._calls.put(None)

    def __call__(self, call: Callable[[], T], meanwhile: Callable[[], object]) -> T:
        """Return the result of `call`, or raise its error. `meanwhile` is called repeatedly until then; an error of it
        is raised instead, and ends the caller."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._make, name="lightning_pipes asking", daemon=True)
            self._thread.start()
        made: Future[T] = Future()
        self._calls.put((call, made))
        while True:
            try:
                return made.result(_CALL_POLL_SECONDS)
            except TimeoutError:
                if made.done():
                    raise
            try:
                meanwhile()
            except BaseException:
                abandon_thread()
                raise

    def _make(self) -> None:
        while (asked := self._calls.get()) is not None:
            call, made = asked
            try:
                made.set_result(call())
            except BaseException as error:
                made.set_exception(error)
