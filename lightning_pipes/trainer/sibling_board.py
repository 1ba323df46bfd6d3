"""The board on which the ranks of an array tell each other how siblings fare."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any


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
    """A part of the ranks' store; nothing is told, or known, before `open`, and where there is a single rank.

    Attributes:
        rank: this one.
        others: the ranks that can be told.
    """

    def __init__(self) -> None:
        self.others: Sequence[int] = ()
        self.rank = 0
        self._store: Any = None
        self._failures = 0

    def open(self, store: Any, rank: int, ranks: int) -> None:
        """This is rank number `rank` of so many, at least two."""
        self.others = [other for other in range(ranks) if other != rank]
        self.rank, self._store = rank, store

    def tell(self, what: str, value: str = "") -> None:
        """This rank has something to say, once."""
        if self._store is not None:
            self._store.set(f"{what}/{self.rank}", value)

    def told(self, what: str, rank: int) -> bool:
        """Whether another rank has said it."""
        return bool(self._store.check([f"{what}/{rank}"]))

    def all_told(self, what: str) -> bool:
        """Whether all ranks have said it, this one having done so."""
        return self._store is None or bool(self._store.check([f"{what}/{rank}" for rank in self.others]))

    def value(self, what: str, rank: int) -> str:
        """What another rank has said."""
        return bytes(self._store.get(f"{what}/{rank}")).decode()

    def tell_failure(self, failure: Failure) -> None:
        """A sibling fails on this rank."""
        if self._store is not None:
            text = f"sibling {failure.index} failed on rank {self.rank}: {failure.text}"
            number = self._store.add("failures", 1)
            self._store.set(f"failure/{number}", pickle.dumps((self.rank, replace(failure, text=text))))

    def failures(self) -> Iterator[Failure]:
        """Those on other ranks that were told since this was asked last."""
        while self._store is not None and self._store.check([f"failure/{self._failures + 1}"]):
            self._failures += 1
            rank, failure = pickle.loads(self._store.get(f"failure/{self._failures}"))
            if rank != self.rank:
                yield failure
