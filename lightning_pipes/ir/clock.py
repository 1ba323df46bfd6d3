"""The clock that measurements, predictions and time limits read.

Everything that decides something by time reads it here: layers and links that are measured, trials, events of a step,
tuning, monitoring, and limits of searches and studies. A test replaces the clock by one that moves only when it is told
to, so that no result depends on the machine. Code that waits for another process, for a connection or for a thread
reads the module `time` instead, because such a wait has to end in real time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """The clock of the operating system."""

    def read_seconds(self) -> float:
        """Return seconds since some moment in the past, as precisely as possible."""
        return time.perf_counter()

    def read_nanoseconds(self) -> int:
        """Return nanoseconds of the monotonic clock, which all processes of a host share."""
        return time.monotonic_ns()

    def sleep(self, seconds: float) -> None:
        """Let `seconds` pass."""
        time.sleep(seconds)


_clock = Clock()


def read_seconds() -> float:
    """Return seconds since some moment in the past; only differences between two calls mean something."""
    return _clock.read_seconds()


def read_nanoseconds() -> int:
    """Return nanoseconds of the monotonic clock, which all processes of a host share."""
    return _clock.read_nanoseconds()


def sleep(seconds: float) -> None:
    """Let `seconds` of this clock pass."""
    _clock.sleep(seconds)


@contextmanager
def use_clock(clock: Clock) -> Iterator[None]:
    """Replace the clock of this process, and of processes that it forks meanwhile."""
    global _clock
    before, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = before
