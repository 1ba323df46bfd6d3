"""The board on which the ranks of an array tell each other how siblings fare."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from lightning_pipes.engine.failure import POLL_SECONDS, FailureWatch, PeerFailure

_REASON_SECONDS = 5 * POLL_SECONDS
"""How long the watch may take to find out why the store does not answer."""


@dataclass(frozen=True)
class Failure:
    """A sibling fails.

    Attributes:
        index: of the sibling.
        turn: the number of the turn that it does not survive.
        text: where and why.
    """

    index: int
    turn: int
    text: str


class Board:
    """A part of the ranks' store; nothing is told, or known, before `open`, and where there is a single rank. Where the
    store has gone with its host, whatever asks it raises PeerFailure.

    Attributes:
        rank: this one.
        others: the ranks that can be told.
    """

    def __init__(self) -> None:
        self.others: Sequence[int] = ()
        self.rank = 0
        self._watch: FailureWatch | None = None
        self._store: Any = None
        self._failures = 0

    def open(self, watch: FailureWatch, rank: int, ranks: int) -> None:
        """This is rank number `rank` of so many, at least two."""
        self.others = [other for other in range(ranks) if other != rank]
        self.rank, self._watch, self._store = rank, watch, watch.store()

    def tell(self, what: str, value: str = "") -> None:
        """This rank has something to say, once."""
        if self._store is not None:
            with self._asked():
                self._store.set(f"{what}/{self.rank}", value)

    def told(self, what: str, rank: int) -> bool:
        """Whether another rank has said it."""
        return self._has(f"{what}/{rank}")

    def all_told(self, what: str) -> bool:
        """Whether all ranks have said it, this one having done so."""
        return self._store is None or self._has(*(f"{what}/{rank}" for rank in self.others))

    def value(self, what: str, rank: int) -> str:
        """What another rank has said."""
        with self._asked():
            return bytes(self._store.get(f"{what}/{rank}")).decode()

    def tell_failure(self, failure: Failure) -> None:
        """A sibling fails on this rank; where the store has gone, so have the others."""
        if self._store is not None:
            text = f"sibling {failure.index} failed on rank {self.rank}: {failure.text}"
            with suppress(RuntimeError):
                number = self._store.add("failures", 1)
                self._store.set(f"failure/{number}", pickle.dumps((self.rank, replace(failure, text=text))))

    def failures(self) -> Iterator[Failure]:
        """Those on other ranks that were told since this was asked last."""
        while self._store is not None and self._has(f"failure/{self._failures + 1}"):
            self._failures += 1
            with self._asked():
                rank, failure = pickle.loads(self._store.get(f"failure/{self._failures}"))
            if rank != self.rank:
                yield failure

    def _has(self, *keys: str) -> bool:
        with self._asked():
            return bool(self._store.check(list(keys)))

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """Raises PeerFailure where the store does not answer the block: the watch's, which says who has ended."""
        try:
            yield
        except RuntimeError as error:
            assert self._watch is not None
            until = time.monotonic() + _REASON_SECONDS
            while time.monotonic() < until:
                self._watch.check()
                time.sleep(POLL_SECONDS / 4)
            raise PeerFailure(f"the store through which ranks know of each other does not answer ({error})") from error
