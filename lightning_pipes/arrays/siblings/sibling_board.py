"""A key-value board on which the ranks of an array publish the state of siblings, with the errors of failed ones."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from lightning_pipes.engine.watch import plain
from lightning_pipes.engine.watch.failure import FailureWatch, PeerFailure
from lightning_pipes.engine.watch.trust import to_printable
from lightning_pipes.ir import PipelineError


@dataclass(frozen=True)
class Failure:
    """A sibling fails.

    Attributes:
        index: of the sibling.
        turn: the number of the turn that it does not survive.
        text: where and why.
        error: the packed error.
    """

    index: int
    turn: int
    text: str
    error: bytes = b""


@dataclass(frozen=True)
class Return:
    """A sibling has returned, and takes part in nothing more.

    Attributes:
        index: of the sibling.
        turn: the number of its last turn.
        meetings: the number of meetings that it took part in.
    """

    index: int
    turn: int
    meetings: int


@dataclass(frozen=True)
class JobCount:
    """A rank has no more jobs than these."""

    jobs: int


News = Failure | Return | JobCount


class PeerStore:
    """A part of the ranks' store. What is published before `open` is sent then; nothing is where there is a single
    rank.

    Where the store has ended, news can't be published any more, and a question raises PeerFailure.

    Attributes:
        rank: this one.
        others: the ranks that get the news.
    """

    def __init__(self) -> None:
        self.others: Sequence[int] = ()
        self.rank = 0
        self._watch: FailureWatch | None = None
        self._store: Any = None
        self._unposted: list[Callable[[], None]] | None = []
        self._news = 0

    def open(self, watch: FailureWatch, rank: int, ranks: int) -> None:
        """Open the board as rank number `rank` of `ranks`."""
        early, self._unposted = self._unposted or [], None
        if ranks > 1:
            self.others = [other for other in range(ranks) if other != rank]
            self.rank, self._watch, self._store = rank, watch, watch.sub_store()
            for say in early:
                say()

    def post_value(self, what: str, value: str = "") -> None:
        """Publish a value of this rank under a key, once."""
        if self._unposted is not None:
            self._unposted.append(partial(self.post_value, what, value))
        elif self._store is not None:
            with suppress(RuntimeError):
                self._store.set(f"{what}/{self.rank}", value)

    def has_posted(self, what: str, rank: int) -> bool:
        """Return whether another rank has published the key."""
        return self._has([f"{what}/{rank}"])

    def have_all_posted(self, what: str) -> bool:
        """Return whether all ranks have published the key, after this one has."""
        return self._store is None or self._has([f"{what}/{rank}" for rank in self.others])

    def values(self, what: str) -> list[str]:
        """Return the values of all ranks, this one's included."""
        with self._answering_store():
            found = self._store.multi_get([f"{what}/{rank}" for rank in range(len(self.others) + 1)])
        return [bytes(each).decode() for each in found]

    def post_news(self, news: News) -> None:
        """Publish news that other ranks read without asking for a key."""
        if self._unposted is not None:
            self._unposted.append(partial(self.post_news, news))
        elif self._store is not None:
            if isinstance(news, Failure):
                news = replace(news, text=f"sibling {news.index} failed on rank {self.rank}: {news.text}")
            with suppress(RuntimeError):
                packed, number = _packed(self.rank, news), self._news + 1
                while self._store.compare_set(f"news/{number}", "", packed).decode() != packed:
                    number += 1

    def read_news(self) -> Iterator[tuple[int, News]]:
        """Yield news of other ranks since the last call, with the ranks."""
        while self._store is not None and self._has([f"news/{self._news + 1}"]):
            self._news += 1
            with self._answering_store():
                rank, news = _unpacked(self._store.get(f"news/{self._news}"))
            if rank != self.rank:
                yield rank, news

    def _has(self, keys: list[str]) -> bool:
        with self._answering_store():
            return bool(self._store.check(keys))

    @contextmanager
    def _answering_store(self) -> Iterator[None]:
        """Raise PeerFailure where the store does not answer the block: that of the watch, which names the rank that has
        ended."""
        try:
            yield
        except RuntimeError as error:
            assert self._watch is not None
            self._watch.raise_reason()
            raise PeerFailure(f"the store through which ranks know of each other does not answer ({error})") from error


def _packed(rank: int, news: News) -> str:
    """News of a rank as JSON."""
    fields = asdict(news)
    if isinstance(news, Failure):
        fields["error"] = base64.b64encode(news.error).decode()
    return json.dumps([rank, type(news).__name__, fields])


def _unpacked(packed: bytes) -> tuple[int, News]:
    rank, kind, fields = json.loads(packed)
    if kind == Failure.__name__:
        fields["error"] = base64.b64decode(fields["error"])
        fields["text"] = to_printable(fields["text"])
        return rank, Failure(**fields)
    return rank, Return(**fields) if kind == Return.__name__ else JobCount(**fields)


class SiblingFailure(PipelineError):  # noqa: N818 - reads as what it is: the failure is on another rank
    """This sibling failed on another rank; the message says where and why."""


def packed_error(error: BaseException) -> bytes:
    """Return an error for other ranks, as the name of its class and data; nothing if that does not make it, or it would
    leave more than a sibling, as SystemExit."""
    kind = type(error)
    with suppress(Exception):
        args = error.__reduce__()[1] if isinstance(error, OSError) else error.args  # which lack its path
        data = plain.dumps((kind.__module__, kind.__qualname__, args, vars(error)))
        if str(_made(data)) == str(error):
            return data
    return b""


def error_from_peer(text: str, packed: bytes) -> Exception:
    """Return the error to raise here: a copy of the other rank's, so that `except`, and `catch` of a study, do the same
    on all ranks, whichever was first; its cause is a SiblingFailure that says `text`. That itself where there is no
    copy."""
    failure = SiblingFailure(text)
    with suppress(Exception):
        error = _made(packed)
        error.__cause__ = failure
        return error
    return failure


def _made(packed: bytes) -> Exception:
    """Return the error, of a class that is known here already; without its `__init__`, which may do anything, if it has
    one of its own."""
    module, name, args, state = plain.loads(packed)
    kind: Any = sys.modules[module]
    for part in name.split("."):
        kind = getattr(kind, part)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        raise TypeError(f"{module}.{name} is no error")
    error: Exception = kind(*args) if module == "builtins" else kind.__new__(kind, *args)
    vars(error).update(state)
    return error
