"""The structures that the kernel takes.

Every field is a list of whole numbers, or for compiled code an int64 array; a letter says by what it is listed: i is an
operation, r a rank, x a link (from one rank to another), w a wire (what links may share), g a group of operations that
cost the same, q a queue. What the kernel only reads is a `Table` of such lists; what it writes is made for each run by
its `Kernel`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]
Numbers = Any
"""A list of whole numbers, or an int64 array."""


class Graph(NamedTuple):
    """The operations: the rank that runs each, what it costs as, and what it is joined with.

    Attributes:
        rank, link, group: (i) the rank that runs it, what moves it (-1 is nothing), the group whose costs it has.
        first, others: `others[first[i] : first[i + 1]]` are the operations that i waits for, in a fixed order; those
            that it holds up, where the order is open.
    """

    rank: Numbers
    link: Numbers
    group: Numbers
    first: Numbers
    others: Numbers


class PriceList(NamedTuple):
    """Nanoseconds, and what links can do.

    Attributes:
        overhead: before each computation; one number.
        busy, quick, late: (g) its time, of a message at its link's rate; a message's at full speed; its latency.
        depth, posted, wire: (x) what its bucket saves at most; receives posted, 0 is any number; what moves its
            messages.
        blocks: (x) whether the sender waits until its messages have left, 0 or 1.
        base: (x) the messages on the links before it: its message n is number `base[x] + n`.
    """

    overhead: int
    busy: Numbers
    quick: Numbers
    late: Numbers
    depth: Numbers
    posted: Numbers
    wire: Numbers
    blocks: Numbers
    base: Numbers


class Wires(NamedTuple):
    """The wires and links as they are at some time.

    Attributes:
        free, spent: (w) until when it moves something, until when its rate is spent.
        moved: (x) messages so far.
        there: by number of the message, when it arrives.
    """

    free: Numbers
    spent: Numbers
    moved: Numbers
    there: Numbers


class Ran(NamedTuple):
    """When operations ran.

    Attributes:
        starts, ends: (i) nanoseconds.
    """

    starts: Numbers
    ends: Numbers


class Queued(NamedTuple):
    """Where computations queue. A queue holds those of one rank, kind and stage.

    Attributes:
        queue: (i) where it stands.
        pool, rows: (i) it takes `rows` samples of the room of queue `pool` when it begins; a negative number gives
            some back when it ends.
        queues: (r) `queues[r] : queues[r + 1]` are its queues.
        sort: (q) FORWARDS for a queue of forwards, WEIGHTS for one of weight gradients, OTHERS for others.
        members: the computations of one queue after those of another.
    """

    queue: Numbers
    pool: Numbers
    rows: Numbers
    queues: Numbers
    sort: Numbers
    members: Numbers


class Beginning(NamedTuple):
    """The queues before anything has run.

    Attributes:
        waiting: (i) how many others it waits for: 0 is ready, and -1 has begun.
        low, count: (q) its members begin at `low`, and `count` of them are ready.
    """

    waiting: Numbers
    low: Numbers
    count: Numbers


class Status(NamedTuple):
    """The queues meanwhile: a `Beginning` that goes on.

    Attributes:
        waiting, low, count: see `Beginning`.
        room: (q) samples that it may still take.
    """

    waiting: Numbers
    low: Numbers
    count: Numbers
    room: Numbers


class Needed(NamedTuple):
    """Bytes that operations need and ranks have.

    Attributes:
        taken, freed: (g) what one takes when it starts and gives back when it ends.
        may: (r) what it may hold.
    """

    taken: Numbers
    freed: Numbers
    may: Numbers


class Held(NamedTuple):
    """Bytes that ranks hold.

    Attributes:
        now, peak: (r) at this time, and at most so far.
    """

    now: Numbers
    peak: Numbers


Fields = TypeVar("Fields", Graph, PriceList, Queued, Beginning, Needed)


@dataclass(frozen=True, eq=False)
class Table(Generic[Fields]):
    """A structure that the kernel only reads, as lists; and as arrays once they are asked for."""

    lists: Fields

    @cached_property
    def arrays(self) -> Fields:
        """The same structure of int64 arrays."""
        made: list[Any] = [field if isinstance(field, int) else np.array(field, np.int64) for field in self.lists]
        return type(self.lists)(*made)
