"""A failure on one rank reaches all others, and nobody waits for the dead.

The side channel is the store through which the ranks found each other: whoever fails first writes there what
happened, everybody reads it several times a second. Broken connections are reported the same way.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from lightning_pipes.ir import PipelineError

POLL_SECONDS = 0.2
GRACE_SECONDS = 8.0
"""How long a rank that knows of a failure may take to leave by itself before its watchdog ends it."""


class PeerFailure(PipelineError):  # noqa: N818 - reads as what it is: the failure is elsewhere
    """Another rank failed; the message names it, its stage, its instruction and the cause."""


def _own_connection(store: Any) -> Any:
    """The same store over a connection of its own: one that waits for a key blocks all others that share it."""
    return store.clone()


class FailureWatch:
    """Tells all ranks of the first failure of any.

    Args:
        store: the c10d store of the process group; None for ranks in one process.
        rank: the global rank, for the message.
        enforce: end the process when it has not closed the watch `GRACE_SECONDS` after a failure elsewhere: a rank
            that is blocked in a collective neither sees exceptions nor runs signal handlers.
    """

    def __init__(self, store: Any, rank: int, enforce: bool = True) -> None:
        self._store = None if store is None else _own_connection(store)
        self._rank = rank
        run = store.add(f"lightning_pipes/runs/{rank}", 1) if store is not None else 0  # the same on every rank
        self._prefix = f"lightning_pipes/{run}"
        self._key = f"{self._prefix}/failure"
        self._stores = 0
        self._enforce = enforce
        self._listeners: list[Callable[[BaseException], None]] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._failed_at: float | None = None
        self.error: PipelineError | None = None
        self._thread: threading.Thread | None = None
        if self._store is not None:
            self._thread = threading.Thread(target=self._watch, name="lightning_pipes failure watch", daemon=True)
            self._thread.start()

    def store(self) -> Any:
        """A part of the store for one purpose of this run; ranks that ask equally often get the same."""
        self._stores += 1
        return PrefixStore(f"{self._prefix}/{self._stores}", _own_connection(self._store))

    def on_failure(self, listener: Callable[[BaseException], None]) -> None:
        """Calls `listener(error)` from another thread when any rank fails; at once if one has."""
        with self._lock:
            self._listeners.append(listener)
            error = self.error
        if error is not None:
            listener(error)

    def fail(self, error: BaseException, where: str = "") -> None:
        """Tells everybody, unless another failure was told before."""
        place = f" in {where}" if where else ""
        text = f"rank {self._rank} failed{place}: {type(error).__name__}: {error}"
        if self._store is not None:
            with suppress(Exception):  # the store may be gone with rank 0, whose closed connections tell the others
                text = self._store.compare_set(self._key, "", text).decode()
        self._notice(text)

    def lost(self, peer: int, error: BaseException) -> None:
        """A connection to `peer` broke. If the peer has said why, that is the failure; else it is gone."""
        if self._closed.is_set():
            return
        if self._store is not None and self._closed.wait(2 * POLL_SECONDS):
            return
        self.fail(error, f"the connection to rank {peer}, which has ended or can't be reached")

    def check(self) -> None:
        """Raises PeerFailure if any rank has failed."""
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Stops watching; this process is safe from the watchdog."""
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def _watch(self) -> None:
        assert self._store is not None
        while not self._closed.wait(POLL_SECONDS):
            if self.error is None:
                try:
                    if self._store.check([self._key]):
                        self._notice(self._store.get(self._key).decode())
                except Exception as error:
                    self._notice(f"the process that hosts the store of this run can't be reached ({error})")
            elif self._enforce and self._failed_at is not None and time.monotonic() > self._failed_at + GRACE_SECONDS:
                print(
                    f"[rank {self._rank}] still blocked {GRACE_SECONDS:.0f} s after: {self.error}; ending",
                    file=sys.stderr,
                )
                sys.stderr.flush()
                os._exit(1)

    def _notice(self, text: str) -> None:
        with self._lock:
            if self.error is not None:
                return
            self.error = PeerFailure(text)
            self._failed_at = time.monotonic()
            listeners = list(self._listeners)
        for listener in listeners:
            listener(self.error)
