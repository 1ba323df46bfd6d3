"""Deferred handling of Ctrl-C and SIGTERM during work that cannot be stopped at an arbitrary point."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

from lightning_pipes.engine.watch.launcher import signal_launched
from lightning_pipes.engine.watch.process_exit import abandon_thread, give_up
from lightning_pipes.trainer.loop.stopping import sigterm_error


class Interrupts:
    """Defer Ctrl-C and SIGTERM between `open` and `close`.

    The first Ctrl-C is only counted, and the caller raises KeyboardInterrupt at a point where nothing is running. The
    second Ctrl-C raises KeyboardInterrupt immediately. SIGTERM is recorded if the running work stops at SIGTERM on its
    own; otherwise, it is raised immediately. Signal handlers are installed only if `open` is called from the main
    thread.

    Args:
        is_heeded: returns whether the running work ends on its own after SIGTERM, as siblings do at the end of a batch.

    Attributes:
        count: number of times that Ctrl-C was pressed.
        terminated: whether SIGTERM has arrived.
        raised_at_once: whether a signal handler raised an exception while work may have been running.
    """

    def __init__(self, is_heeded: Callable[[], bool]) -> None:
        self.count = 0
        self.terminated = False
        self.raised_at_once = False
        self._is_heeded = is_heeded
        self._opened = False

    def open(self) -> None:
        """Reset all counts and install the signal handlers."""
        self.count, self.terminated, self.raised_at_once = 0, False, False
        if threading.current_thread() is threading.main_thread():
            self._opened = True
            self._before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGINT, self._note)
            signal.signal(signal.SIGTERM, self._note_sigterm)

    def close(self) -> None:
        """Restore the previous signal handlers."""
        if self._opened:
            self._opened = False
            interrupt, terminate = self._before
            signal.signal(signal.SIGINT, interrupt)
            signal.signal(signal.SIGTERM, terminate)

    def raise_later(self) -> None:
        """Raise SIGTERM again if it arrived before `close`. Call this after `close`."""
        if self.terminated:
            signal.raise_signal(signal.SIGTERM)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            self.raised_at_once = True
            raise KeyboardInterrupt

    def _note_sigterm(self, signum: int, frame: FrameType | None) -> None:
        if not self.terminated:
            signal_launched(signum)
        self.terminated = True
        if not self._is_heeded():
            self.raised_at_once = True
            give_up()
            abandon_thread()
            raise sigterm_error()
