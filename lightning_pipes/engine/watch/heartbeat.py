"""Heartbeats: every process counts up in the store, and waiting ranks check that the count moves.

The store also holds the identity of each process, and the mark that it has exited.
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
    """Measures how long a count has not moved, on the observer's clock, so that clocks of other hosts do not matter.

    At most `gap` seconds count between two checks. So a process that was stopped, or suspended with all others, does
    not take its own sleep for a stall of the others.
    """

    def __init__(self, gap: float) -> None:
        self._gap = gap
        self._count: int | None = None
        self._looked = 0.0
        self._seconds = 0.0

    def stalled_seconds(self, count: int, now: float) -> float:
        """Return how long `count` has been the same, as seen at `now`, a monotonic time."""
        passed = min(now - self._looked, self._gap)
        self._seconds = self._seconds + passed if count == self._count else 0.0
        self._count, self._looked = count, now
        return self._seconds


class Heartbeat:
    """Counts up once a second for as long as the process lives, also between runs, where user code may take hours.

    Attributes:
        connection: a connection to the store for calls that are answered at once. A call that waits for a key needs
            its own connection, because a connection serves one call at a time.
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
        """Return the number of heartbeats of `rank`."""
        key = _key("heart", rank)
        return int(self.connection.get(key)) if self.connection.check([key]) else 0

    def known_process(self, rank: int) -> Process | None:
        """Return the process of `rank`; None where `find_process` has not found it."""
        return self._processes.get(rank)

    def find_process(self, rank: int) -> Process | None:
        """Return the process of `rank`; None where it is not registered yet."""
        if rank not in self._processes and self.connection.check([_key("place", rank)]):
            process = Process.parse(self.connection.get(_key("place", rank)).decode())
            if process is not None:
                self._processes[rank] = process
        return self._processes.get(rank)

    def has_exited(self, rank: int) -> bool:
        """Return whether the interpreter of `rank` has marked its end."""
        return bool(self.connection.check([_key("ended", rank)]))

    def next_run(self, rank: int) -> int:
        """Return the number of the run that begins; the same on every rank."""
        self._runs[rank] += 1
        return self._runs[rank]

    def stop(self) -> None:
        """Stop the heartbeat; the interpreter can end."""
        self._ended.set()
        self._thread.join(timeout=2.0)

    def _beat(self) -> None:
        try:
            for beats in itertools.count(1):
                if self._ended.wait(BEAT_SECONDS):
                    break
                self.connection.set(
                    _key("heart", self._rank), str(beats)
                )  # and not `add`: what that makes can't be signed
            self.connection.set(_key("ended", self._rank), "")
        except RuntimeError:  # the store is gone, which the failure watch of a run reports
            return


_heartbeat: Heartbeat | None = None


def get_heartbeat(store: Any, rank: int) -> Heartbeat:
    """Return the heartbeat of this process, which beats in `store` from the first call on."""
    global _heartbeat
    if _heartbeat is None:
        atexit.register(stop_heartbeat)
    if _heartbeat is None or _heartbeat.store is not store:
        stop_heartbeat()
        _heartbeat = Heartbeat(store, rank)
    return _heartbeat


def stop_heartbeat() -> None:
    """Mark the end of this process, as at the end of an interpreter."""
    if _heartbeat is not None:
        _heartbeat.stop()


def _key(what: str, rank: int) -> str:
    return f"lightning_pipes/{what}/{rank}"
