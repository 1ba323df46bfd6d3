"""Ctrl-C while something runs that can't be stopped anywhere."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Interrupts:
    """From `open` to `close` Ctrl-C is taken note of, to be raised where nothing runs; the second one raises
    KeyboardInterrupt at once. Other threads than the main one get none.

    Attributes:
        count: so many came.
    """

    def __init__(self) -> None:
        self.count = 0
        self._opened = False

    def open(self) -> None:
        """Counts from 0."""
        self.count = 0
        if threading.current_thread() is threading.main_thread():
            self._opened = True
            self._before = signal.getsignal(signal.SIGINT)
            signal.signal(signal.SIGINT, self._note)

    def close(self) -> None:
        """From now on Ctrl-C is what it was before."""
        if self._opened:
            self._opened = False
            signal.signal(signal.SIGINT, self._before)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt
