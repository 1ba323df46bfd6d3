"""Signs of life: every process counts up in the store, and whoever waits for it looks whether the count moves.

There it also says which process it is, and in the end that it has come to its end.
"""

from __future__ import annotations

import atexit
import json
import threading
from typing import Any

from lightning_pipes.engine.places import Place, own_place

BEAT_SECONDS = 1.0


class Silence:
    """How long a count has not moved, in the time of who looks; nobody's clock on another host matters.

    Between two looks at most `gap` seconds count. So whoever was itself stopped, or suspended with all others, does not
    take its own sleep for the silence of the rest.
    """

    def __init__(self, gap: float) -> None:
        self._gap = gap
        self._count: int | None = None
        self._looked = 0.0
        self._seconds = 0.0

    def seconds(self, count: int, now: float) -> float:
        """How long `count` has been the same, as seen at `now`, a monotonic time."""
        passed = min(now - self._looked, self._gap)
        self._seconds = self._seconds + passed if count == self._count else 0.0
        self._count, self._looked = count, now
        return self._seconds


class Heart:
    """Counts up once a second for as long as the process lives, also between runs, when user code may take hours.

    Attributes:
        line: a connection to the store for what is answered at once. What waits for a key needs one of its own: a
            connection serves one call at a time.
        last_words: another, for when `line` is blocked.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self.store = store
        self.line, self.last_words = store.clone(), store.clone()
        self._rank = rank
        self._places: dict[int, Place] = {}
        self._ended = threading.Event()
        self.line.set(_key("place", rank), json.dumps(own_place()))
        self._thread = threading.Thread(target=self._beat, name="lightning_pipes heart", daemon=True)
        self._thread.start()

    def beats(self, rank: int) -> int:
        """How often the heart of `rank` has beaten."""
        return int(self.line.add(_key("heart", rank), 0))

    def place(self, rank: int) -> Place | None:
        """Which process is `rank`; None where it has not said so yet, or `ask` has not asked."""
        return self._places.get(rank)

    def ask(self, rank: int) -> Place | None:
        """Which process is `rank`; None where it has not said so yet."""
        if rank not in self._places and self.line.check([_key("place", rank)]):
            host, pid = json.loads(self.line.get(_key("place", rank)))
            self._places[rank] = host, pid
        return self._places.get(rank)

    def has_come_to_its_end(self, rank: int) -> bool:
        """Whether the interpreter of `rank` has ended, as it says itself."""
        return bool(self.line.check([_key("ended", rank)]))

    def stop(self) -> None:
        """No more beats; the interpreter can end."""
        self._ended.set()
        self._thread.join(timeout=2.0)

    def _beat(self) -> None:
        try:
            while not self._ended.wait(BEAT_SECONDS):
                self.line.add(_key("heart", self._rank), 1)
            self.line.set(_key("ended", self._rank), "")
        except RuntimeError:  # the store is gone, which the watch of a run notices and tells
            return


_heart: Heart | None = None


def heart_of(store: Any, rank: int) -> Heart:
    """The heart of this process, which beats in `store` from the first call on."""
    global _heart
    if _heart is None:
        atexit.register(_stop)
    if _heart is None or _heart.store is not store:
        _stop()
        _heart = Heart(store, rank)
    return _heart


def _stop() -> None:
    if _heart is not None:
        _heart.stop()


def _key(what: str, rank: int) -> str:
    return f"lightning_pipes/{what}/{rank}"
