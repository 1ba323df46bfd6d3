"""The clock that is read by measurements, predictions and time limits.

All code that makes a decision based on time reads this clock: measurements of layers and links, trials, events of a
step, tuning, monitoring, and the time limits of searches and studies. Tests replace it with a clock that only advances
on request, so that no result depends on the speed of the machine. Code that waits for another process, for a connection
or for a thread uses the module `time` instead, because such a wait has to end in real time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """The clock of the operating system. Tests derive from this class to control the time."""

    def read_seconds(self) -> float:
        """Return the seconds since an arbitrary moment in the past, with the highest available resolution."""
        return time.perf_counter()

    def read_nanoseconds(self) -> int:
        """Return the nanoseconds of the monotonic clock, which is the same for all processes on a host."""
        return time.monotonic_ns()

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""
        time.sleep(seconds)


_clock = Clock()


def read_seconds() -> float:
    """Return the seconds since an arbitrary moment in the past.

    Only the difference between the results of two calls is meaningful.
    """
    return _clock.read_seconds()


def read_nanoseconds() -> int:
    """Return the nanoseconds of the monotonic clock, which is the same for all processes on a host."""
    return _clock.read_nanoseconds()


def sleep(seconds: float) -> None:
    """Wait until `seconds` have passed on the current clock."""
    _clock.sleep(seconds)


@contextmanager
def use_clock(clock: Clock) -> Iterator[None]:
    """Use `clock` inside a `with` block, in this process and in processes that it forks inside the block."""
    global _clock
    before, _clock = _clock, clock
    try:
        yield
    finally:
        _clock = before
