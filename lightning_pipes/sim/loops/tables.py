"""The data structures of the kernel.

Every field is a list of integers or, for compiled code, an int64 array. A letter specifies the index of the list: i is
an operation, r a rank, x a link (from one rank to another), w a wire (which several links may share), g a group of
operations with the same cost, and q a queue. Structures that the kernel only reads are stored in a `Table` of such
lists. Structures that it modifies are created for each run by its `Kernel`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]
Numbers = Any
"""A list of integers, or an int64 array."""


class Graph(NamedTuple):
    """The operations: their ranks, links and groups, and their dependencies.

    Attributes:
        rank, link, group: (i) the rank that runs the operation, the link that moves it (-1 for a computation), and the
            group that determines its cost.
        first, others: `others[first[i] : first[i + 1]]` are the operations for which i waits, if the order is fixed. If
            the order is open, they are the operations that i holds up.
    """

    rank: Numbers
    link: Numbers
    group: Numbers
    first: Numbers
    others: Numbers


class PriceList(NamedTuple):
    """Durations in nanoseconds, and properties of links.

    Attributes:
        overhead: the time before each computation; one number.
        busy, quick, late: (g) the duration of an operation, which for a message is its time at the rate of the link;
            the duration of a message at full speed; the latency of a message.
        depth, posted, wire: (x) the size of the token bucket; the number of posted receives, 0 for no limit; the wire
            that moves the messages.
        blocks: (x) whether the sender waits until its messages have left, 0 or 1.
        base: (x) the number of messages on all links before x. Message n of the link has number `base[x] + n`.
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
    """The state of the wires and links at some time.

    Attributes:
        free, spent: (w) the time until which the wire moves a message, and the time until which its rate is used up.
        moved: (x) the number of messages so far.
        there: the arrival time of each message, by the number of the message.
    """

    free: Numbers
    spent: Numbers
    moved: Numbers
    there: Numbers


class Ran(NamedTuple):
    """The times of operations.

    Attributes:
        starts, ends: (i) nanoseconds.
    """

    starts: Numbers
    ends: Numbers


class Queued(NamedTuple):
    """The queues of computations. A queue contains the computations of one rank, kind and stage.

    Attributes:
        queue: (i) the queue of the operation.
        pool, rows: (i) the operation takes `rows` samples of the room of queue `pool` when it begins. If `rows` is
            negative, the operation returns samples when it ends.
        queues: (r) `queues[r] : queues[r + 1]` are the queues of the rank.
        sort: (q) FORWARD_KIND for a queue of forwards, WEIGHT_KIND for a queue of weight gradients, OTHER_KIND for all
            other queues.
        members: the computations of all queues, one queue after the other.
    """

    queue: Numbers
    pool: Numbers
    rows: Numbers
    queues: Numbers
    sort: Numbers
    members: Numbers


class Beginning(NamedTuple):
    """The queues before any operation has run.

    Attributes:
        waiting: (i) the number of operations for which it waits. An operation with 0 is ready, and an operation with -1
            has begun.
        low, count: (q) the position of the first member, and the number of members that are ready.
    """

    waiting: Numbers
    low: Numbers
    count: Numbers


class Status(NamedTuple):
    """The state of the queues during a run, which starts with a `Beginning`.

    Attributes:
        waiting, low, count: see `Beginning`.
        room: (q) the number of samples that the queue may still take.
    """

    waiting: Numbers
    low: Numbers
    count: Numbers
    room: Numbers


class Needed(NamedTuple):
    """The bytes that operations need and ranks may hold.

    Attributes:
        taken, freed: (g) the bytes that an operation allocates when it starts and frees when it ends.
        may: (r) the bytes that the rank may hold.
    """

    taken: Numbers
    freed: Numbers
    may: Numbers


class Held(NamedTuple):
    """The bytes that ranks hold.

    Attributes:
        now, peak: (r) the current value, and the largest value so far.
    """

    now: Numbers
    peak: Numbers


Fields = TypeVar("Fields", Graph, PriceList, Queued, Beginning, Needed)


@dataclass(frozen=True, eq=False)
class Table(Generic[Fields]):
    """A structure that the kernel only reads, stored as lists and converted to arrays on demand."""

    lists: Fields

    @cached_property
    def arrays(self) -> Fields:
        """The same structure with int64 arrays."""
        made: list[Any] = [field if isinstance(field, int) else np.array(field, np.int64) for field in self.lists]
        return type(self.lists)(*made)
