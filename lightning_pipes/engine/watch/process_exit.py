"""Ends a process that has given up waiting for other ranks, and makes calls that may never return.

After a collective was abandoned, the threads of gloo wait for it until its timeout, which is half an hour. The
destructor of the process group waits for these threads, and the interpreter destroys all objects when it exits. In
addition, a call of torch may return to a Python thread while the interpreter exits, for example when the other rank
exits at the same time. Python versions before 3.14 then unwind the thread, and the C++ runtime aborts the process.
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

_EXIT_POLL_SECONDS = 0.2
_MAX_EXIT_SECONDS = 20
"""Longest time that the exit of the interpreter may take, in seconds."""
_given_up = threading.Event()
_waits = threading.Lock()
_left = threading.Lock()


def give_up() -> None:
    """Record that this process may have collectives that do not complete."""
    _given_up.set()


def has_given_up() -> bool:
    """Return whether this process may have collectives that do not complete."""
    return _given_up.is_set()


def claim_final_wait() -> bool:
    """Return True at the first call and False afterwards.

    One thread is sufficient to wait for the end of the main thread.
    """
    return _waits.acquire(blocking=False)


def wait_for_main_thread() -> None:
    """Wait until the main thread has ended, so that only the shutdown of the interpreter remains."""
    while threading.main_thread().is_alive():  # `join` would interfere with the shutdown of the main thread
        time.sleep(_EXIT_POLL_SECONDS)


def leak_until_exit(things: Iterable[object]) -> None:
    """Keep objects alive until the process has ended, so that their destructors do not run.

    The interpreter still shuts down in order, with its output and exit status. With the GNU C library, the process then
    ends immediately. On other systems, it does not wait for threads of these objects either. An exit handler of Python
    could not end the process, because it does not know the exit status.

    Args:
        things: the objects, such as process groups.
    """
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        if hasattr(library, "on_exit"):
            library.on_exit(library._exit, None)
        _pause_on_terminate(library)


def abandon_thread() -> None:
    """Record that a thread remains blocked in a call of torch, so that it does not disturb the exit of the process."""
    if _left.acquire(blocking=False):
        atexit.register(leak_until_exit, ())


def _pause_on_terminate(library: ctypes.CDLL) -> None:
    """Pause a thread that the C++ runtime would terminate, until the process ends.

    An alarm limits the time, unless the process already uses alarms.
    """
    try:
        set_terminate = ctypes.CDLL("libstdc++.so.6")["_ZSt13set_terminatePFvvE"]
    except (OSError, AttributeError):  # another C++ library
        return
    if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL and not any(signal.getitimer(signal.ITIMER_REAL)):
        signal.alarm(_MAX_EXIT_SECONDS)
        set_terminate(library.pause)


def skip_final_gc() -> None:
    """Flush all open files and skip the final garbage collection.

    On a busy machine, the final garbage collection takes seconds, during which other ranks or the launcher wait. It
    would have closed the files.
    """
    for thing in gc.get_objects():
        if issubclass(type(thing), io.IOBase):
            with suppress(Exception):  # file objects of any class, which may raise any error
                thing.flush()
    gc.freeze()


T = TypeVar("T")
_CALL_POLL_SECONDS = 0.1


class SerialCaller:
    """Makes calls one after another in a daemon thread, for which the process does not wait when it exits.

    Use it as a context manager. At the end of the `with` block, the thread ends after its last call.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> SerialCaller:
        return self

    def __exit__(self, *error: object) -> None:
        self._calls.put(None)

    def __call__(self, call: Callable[[], T], meanwhile: Callable[[], object]) -> T:
        """Make a call in the thread, and return its result or raise its error.

        Args:
            call: the function to call.
            meanwhile: called repeatedly in the current thread until the call has ended. If it raises an error, the call
                is abandoned and the error is raised.
        """
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
