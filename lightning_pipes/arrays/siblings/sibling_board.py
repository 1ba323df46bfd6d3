"""A key-value board on which the ranks of an array publish the state of their siblings.

The state includes the errors of failed siblings.
"""

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
    """News that a sibling fails.

    Attributes:
        index: the index of the sibling.
        turn: the number of the turn in which the sibling ends.
        text: the place and the reason of the failure.
        error: the serialized error.
    """

    index: int
    turn: int
    text: str
    error: bytes = b""


@dataclass(frozen=True)
class Return:
    """News that a sibling has returned. It takes no further turns and joins no further meetings.

    Attributes:
        index: the index of the sibling.
        turn: the number of its last turn.
        meetings: number of meetings in which the sibling took part.
    """

    index: int
    turn: int
    meetings: int


@dataclass(frozen=True)
class JobCount:
    """News that a rank has no more jobs than this number."""

    jobs: int


News = Failure | Return | JobCount


class PeerStore:
    """A section of the store that all ranks share.

    Values and news that are posted before `open` are published when it is called. With a single rank, nothing is
    published. If the store is no longer available, posting has no effect, and reading raises PeerFailure.

    Attributes:
        rank: this rank.
        others: the other ranks, which receive the news.
    """

    def __init__(self) -> None:
        self.others: Sequence[int] = ()
        self.rank = 0
        self._watch: FailureWatch | None = None
        self._store: Any = None
        self._unposted: list[Callable[[], None]] | None = []
        self._news = 0

    def open(self, watch: FailureWatch, rank: int, ranks: int) -> None:
        """Open the board on rank number `rank` of `ranks` ranks.

        Args:
            watch: provides the store, and the reason if the store does not answer.
            rank: this rank.
            ranks: number of ranks.
        """
        early, self._unposted = self._unposted or [], None
        if ranks > 1:
            self.others = [other for other in range(ranks) if other != rank]
            self.rank, self._watch, self._store = rank, watch, watch.sub_store()
            for say in early:
                say()

    def post_value(self, what: str, value: str = "") -> None:
        """Publish a value of this rank under a key. Each key is published once."""
        if self._unposted is not None:
            self._unposted.append(partial(self.post_value, what, value))
        elif self._store is not None:
            with suppress(RuntimeError):
                self._store.set(f"{what}/{self.rank}", value)

    def has_posted(self, what: str, rank: int) -> bool:
        """Return whether another rank has published this key."""
        return self._has([f"{what}/{rank}"])

    def have_all_posted(self, what: str) -> bool:
        """Return whether all other ranks have published this key. This rank must have published it before."""
        return self._store is None or self._has([f"{what}/{rank}" for rank in self.others])

    def values(self, what: str) -> list[str]:
        """Return the values that all ranks published under this key, in the order of ranks."""
        with self._answering_store():
            found = self._store.multi_get([f"{what}/{rank}" for rank in range(len(self.others) + 1)])
        return [bytes(each).decode() for each in found]

    def post_news(self, news: News) -> None:
        """Publish news, which other ranks can read without knowing a key."""
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
        """Yield the news that other ranks have published since the last call, with the number of the rank."""
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
        """Raise PeerFailure if the store does not answer inside the block.

        If the watch has found a failure, its error is raised, which names the rank that has ended.
        """
        try:
            yield
        except RuntimeError as error:
            assert self._watch is not None
            self._watch.raise_reason()
            raise PeerFailure(
                f"the store through which the ranks exchange messages does not answer ({error})"
            ) from error


def _packed(rank: int, news: News) -> str:
    """Return the news of a rank as JSON."""
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
    """This sibling failed on another rank. The message contains the place and the reason."""


def packed_error(error: BaseException) -> bytes:
    """Return an error in serialized form for other ranks, as the name of its class and its data.

    The result is empty if the error cannot be restored from this data, or if it would end more than a sibling, as
    SystemExit would.
    """
    kind = type(error)
    with suppress(Exception):
        args = error.__reduce__()[1] if isinstance(error, OSError) else error.args  # an OSError's args lack its path
        data = plain.dumps((kind.__module__, kind.__qualname__, args, vars(error)))
        if str(_made(data)) == str(error):
            return data
    return b""


def error_from_peer(text: str, packed: bytes) -> Exception:
    """Return the error to raise on this rank after a sibling failed on another rank.

    It is a copy of the other rank's error, so that `except` clauses, and `catch` of a study, have the same effect on
    all ranks, no matter which rank failed first. The cause of the copy is a SiblingFailure with the message `text`. If
    no copy can be made, the SiblingFailure itself is returned.

    Args:
        text: the place and the reason of the failure.
        packed: the error as returned by `packed_error`.
    """
    failure = SiblingFailure(text)
    with suppress(Exception):
        error = _made(packed)
        error.__cause__ = failure
        return error
    return failure


def _made(packed: bytes) -> Exception:
    """Return the error from its serialized form. Its class must be in a module that is already imported.

    If the class is not a built-in one, `__init__` is not called, because it may have arbitrary side effects.
    """
    module, name, args, state = plain.loads(packed)
    kind: Any = sys.modules[module]
    for part in name.split("."):
        kind = getattr(kind, part)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        raise TypeError(f"{module}.{name} is not a class of exceptions")
    error: Exception = kind(*args) if module == "builtins" else kind.__new__(kind, *args)
    vars(error).update(state)
    return error
