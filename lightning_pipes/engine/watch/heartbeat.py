"""Heartbeats: each process increments a counter in the store, and other ranks check that the counter increases.

The store also contains the identity of each process, and a mark for each process that has exited.
"""

from __future__ import annotations

import atexit
import itertools
import threading
from collections import Counter
from typing import Any

from lightning_pipes.engine.watch.identity import Process

BEAT_SECONDS = 1.0


class StallTimer:
    """Measures how long a counter has not changed.

    The time is measured with the clock of the observer, so that clocks of different hosts need not agree. At most `gap`
    seconds are counted between two checks. A process that was stopped, or suspended together with all others, therefore
    does not mistake its own suspension for a stall of another process.
    """

    def __init__(self, gap: float) -> None:
        self._gap = gap
        self._count: int | None = None
        self._looked = 0.0
        self._seconds = 0.0

    def stalled_seconds(self, count: int, now: float) -> float:
        """Return how long the counter has had the same value, in seconds.

        Args:
            count: the current value of the counter.
            now: the current monotonic time in seconds.
        """
        passed = min(now - self._looked, self._gap)
        self._seconds = self._seconds + passed if count == self._count else 0.0
        self._count, self._looked = count, now
        return self._seconds


class Heartbeat:
    """Increments a counter once a second for as long as the process lives.

    The heartbeat continues between runs, when user code may take hours.

    Attributes:
        connection: a connection to the store for calls that return immediately. A call that waits for a key needs a
            separate connection, because a connection serves one call at a time.
        report_connection: another connection, for reports while `connection` is blocked.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self.store = store
        self.connection, self.report_connection = store.clone(), store.clone()
        self._rank = rank
        self._processes: dict[int, Process] = {}
        self._runs: Counter[int] = Counter()
        self._ended = threading.Event()
        self.connection.set(_key("place", rank), str(Process.current()))
        self._thread = threading.Thread(target=self._beat, name="lightning_pipes heart", daemon=True)
        self._thread.start()

    def count_beats(self, rank: int) -> int:
        """Return the number of heartbeats of `rank` so far."""
        key = _key("heart", rank)
        return int(self.connection.get(key)) if self.connection.check([key]) else 0

    def known_process(self, rank: int) -> Process | None:
        """Return the process of `rank` if `find_process` has already found it, and None otherwise."""
        return self._processes.get(rank)

    def find_process(self, rank: int) -> Process | None:
        """Return the process of `rank`, or None if it is not registered in the store yet."""
        if rank not in self._processes and self.connection.check([_key("place", rank)]):
            process = Process.parse(self.connection.get(_key("place", rank)).decode())
            if process is not None:
                self._processes[rank] = process
        return self._processes.get(rank)

    def has_exited(self, rank: int) -> bool:
        """Return whether the process of `rank` has reported the exit of its interpreter."""
        return bool(self.connection.check([_key("ended", rank)]))

    def next_run(self, rank: int) -> int:
        """Return the number of the run that begins, which is the same on all ranks."""
        self._runs[rank] += 1
        return self._runs[rank]

    def stop(self) -> None:
        """Stop the heartbeat, so that the interpreter can exit."""
        self._ended.set()
        self._thread.join(timeout=2.0)

    def _beat(self) -> None:
        try:
            for beats in itertools.count(1):
                if self._ended.wait(BEAT_SECONDS):
                    break
                # `Store.add` is not used, because its counters can't be signed.
                self.connection.set(_key("heart", self._rank), str(beats))
            self.connection.set(_key("ended", self._rank), "")
        except RuntimeError:  # the store has ended, which the failure watch of the run reports
            return


_heartbeat: Heartbeat | None = None


def get_heartbeat(store: Any, rank: int) -> Heartbeat:
    """Return the heartbeat of this process, and start it at the first call.

    Args:
        store: the store for the heartbeat. A call with a different store stops the previous heartbeat and starts a new
            one.
        rank: the global rank of this process.
    """
    global _heartbeat
    if _heartbeat is None:
        atexit.register(stop_heartbeat)
    if _heartbeat is None or _heartbeat.store is not store:
        stop_heartbeat()
        _heartbeat = Heartbeat(store, rank)
    return _heartbeat


def stop_heartbeat() -> None:
    """Stop the heartbeat and report the exit of this process, as at the end of the interpreter."""
    if _heartbeat is not None:
        _heartbeat.stop()


def _key(what: str, rank: int) -> str:
    return f"lightning_pipes/{what}/{rank}"
