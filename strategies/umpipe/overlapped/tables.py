"""The structures that the kernel of overlapped directions takes.

Every field is a list of whole numbers, or for compiled code an int64 array; a letter says by what it is listed: p is a
process, i a stage, r what runs one chunk at a time. Processes of both directions are one chain of 2 K, as samples pass
them: p from 0 to K - 1 forward, from K to 2 K - 1 backward. Stage i computes the chunks of p = 2 i and 2 K - 1 - 2 i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightning_pipes.sim.loops.jit import Kernel
from lightning_pipes.sim.loops.tables import Numbers

FREE = 1 << 40
"""More rows and bytes than a stage has."""


class Chunks(NamedTuple):
    """How a batch is cut.

    Attributes:
        rows: samples of the batch.
        busy: (p) what a chunk takes.
        size: (p) samples of a chunk, the last one may have fewer.
    """

    rows: int
    busy: Numbers
    size: Numbers


class Memory(NamedTuple):
    """The room that rows take on stages, in any unit, and that there is.

    Attributes:
        caps: (i) rows in flight above which no further forward starts, unless nothing is in flight.
        held: (i) what a row takes from the start of its forward to the end of its backward.
        arrived: (i) what a row takes from its arrival to the start of its forward.
        returned: (i) what a row's gradient takes from its arrival to the start of its backward.
        most: (i) what the stage may hold; nothing that holds more is an answer.
    """

    caps: Numbers
    held: Numbers
    arrived: Numbers
    returned: Numbers
    most: Numbers


class Room(NamedTuple):
    """Stages that share a rank, and the notes of `kernel.run_chunks`.

    Attributes:
        lead, beside: (i) the first stage on its rank, and the next one there, the first after the last.
        begun, done: (p) rows whose chunks have begun, and ended.
        rest: (p) what the chunks that have not begun take.
        tail: (p) what the processes after it take at least.
        idle: (r) whether it runs nothing.
        running, ends: the processes whose chunks are under way and when these end, the soonest last.
        touched: those r that something happened to, twice as long as there are r.
        flying, level, peak: (i) rows in flight, what is held now, and what was held at most.
    """

    lead: Numbers
    beside: Numbers
    begun: Numbers
    done: Numbers
    rest: Numbers
    tail: Numbers
    idle: Numbers
    running: Numbers
    ends: Numbers
    touched: Numbers
    flying: Numbers
    level: Numbers
    peak: Numbers


class Log(NamedTuple):
    """The chunks as they ran; nothing is written where `starts` is empty.

    Attributes:
        first: (p) where its first chunk is in the other two.
        starts: when each chunk began.
        turns: as how many-th of all chunks.
    """

    first: Numbers
    starts: Numbers
    turns: Numbers


def make_room(kernel: Kernel, stages: int, ranks: Sequence[int] = ()) -> Room:
    """Return notes for so many stages, which sit on these ranks; by default each on one of its own."""
    processes, runners = 4 * stages - 2, 3 * stages - 2
    lengths = (*(processes,) * 4, *(runners,) * 3, 2 * runners, *(stages,) * 3)
    where = tuple(ranks) or tuple(range(stages))
    same = [[s for s in range(stages) if where[s] == rank] for rank in where]
    lead = kernel.copy([there[0] for there in same])
    beside = kernel.copy([there[(there.index(s) + 1) % len(there)] for s, there in enumerate(same)])
    return Room(lead, beside, *map(kernel.fill, lengths))


def make_log(kernel: Kernel, chunks: Chunks | None = None) -> Log:
    """Return room for all of `chunks`; without, nothing is logged."""
    if chunks is None:
        return Log(kernel.fill(0), kernel.fill(0), kernel.fill(0))
    counts = [-(-chunks.rows // int(size)) for size in chunks.size]
    ends = np.cumsum(counts)
    return Log(kernel.copy(ends - counts), kernel.fill(int(ends[-1])), kernel.fill(int(ends[-1])))


def make_memory(kernel: Kernel, stages: int, memory: Memory | None = None) -> Memory:
    """Return `memory` for the kernel; without, rows in flight count, and nothing is limited."""
    if memory is None:
        memory = Memory(*((value,) * stages for value in (FREE, 1, 0, 0, FREE)))
    return Memory(*map(kernel.copy, memory))
