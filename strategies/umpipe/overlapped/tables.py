"""The structures that the kernel for overlapping directions takes.

Every field is a list of integers, or an int64 array for compiled code. A letter specifies the index of the list: p is a
process, i is a stage, and r is a rank or link, which runs one chunk at a time. The processes of both directions form
one chain of 2 K processes, in the order in which samples pass through them: p from 0 to K - 1 is forward, and p from K
to 2 K - 1 is backward. Stage i computes the chunks of p = 2 i and p = 2 K - 1 - 2 i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightning_pipes.sim.loops.jit import Kernel
from lightning_pipes.sim.loops.tables import Numbers

NO_CAP = 1 << 40
"""More rows or bytes than a stage can have."""


class Chunks(NamedTuple):
    """The chunks of a batch in each process.

    Attributes:
        rows: the number of samples in the batch.
        busy: (p) the duration of a chunk.
        size: (p) the number of samples in a chunk. The last chunk may have fewer.
    """

    rows: int
    busy: Numbers
    size: Numbers


class Memory(NamedTuple):
    """The memory that rows need on each stage and the memory that the stage has, in any unit.

    Attributes:
        caps: (i) the number of rows in flight above which no further forward starts, unless nothing is in flight.
        held: (i) the memory of a row from the start of its forward to the end of its backward.
        arrived: (i) the memory of a row from its arrival to the start of its forward.
        returned: (i) the memory of a row's gradient from its arrival to the start of its backward.
        most: (i) the maximum memory of the stage. A run that needs more is not a valid result.
    """

    caps: Numbers
    held: Numbers
    arrived: Numbers
    returned: Numbers
    most: Numbers


class Room(NamedTuple):
    """The stages that share a rank, and the working memory of `kernel.run_chunks`.

    Attributes:
        lead: (i) the first stage on the rank of this stage.
        beside: (i) the next stage on the same rank. After the last stage, this is the first one.
        begun, done: (p) the number of rows whose chunks have begun, and ended.
        rest: (p) the total duration of the chunks that have not begun.
        tail: (p) the minimum duration of the processes after it.
        idle: (r) whether it is idle.
        running, ends: the processes whose chunks are running and the end times of these chunks, with the earliest end
            last.
        touched: the numbers r of ranks and links for which something changed. It has twice as many entries as there are
            r.
        flying, level, peak: (i) the number of rows in flight, the memory in use, and the peak of the memory in use.
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
    """The chunks in the order in which they ran. Nothing is written if `starts` is empty.

    Attributes:
        first: (p) the index of the process's first chunk in the other two lists.
        starts: the start time of each chunk.
        turns: the position of each chunk in the order in which all chunks started.
    """

    first: Numbers
    starts: Numbers
    turns: Numbers


def make_room(kernel: Kernel, stages: int, ranks: Sequence[int] = ()) -> Room:
    """Return the working memory for `stages` stages on these ranks, by default with a rank for each stage."""
    processes, runners = 4 * stages - 2, 3 * stages - 2
    lengths = (*(processes,) * 4, *(runners,) * 3, 2 * runners, *(stages,) * 3)
    where = tuple(ranks) or tuple(range(stages))
    same = [[s for s in range(stages) if where[s] == rank] for rank in where]
    lead = kernel.copy([there[0] for there in same])
    beside = kernel.copy([there[(there.index(s) + 1) % len(there)] for s, there in enumerate(same)])
    return Room(lead, beside, *map(kernel.fill, lengths))


def make_log(kernel: Kernel, chunks: Chunks | None = None) -> Log:
    """Return a log with room for all `chunks`. Without `chunks`, nothing is logged."""
    if chunks is None:
        return Log(kernel.fill(0), kernel.fill(0), kernel.fill(0))
    counts = [-(-chunks.rows // int(size)) for size in chunks.size]
    ends = np.cumsum(counts)
    return Log(kernel.copy(ends - counts), kernel.fill(int(ends[-1])), kernel.fill(int(ends[-1])))


def make_memory(kernel: Kernel, stages: int, memory: Memory | None = None) -> Memory:
    """Return `memory` in the form that the kernel takes.

    By default, the rows in flight are counted and nothing is limited.
    """
    if memory is None:
        memory = Memory(*((value,) * stages for value in (NO_CAP, 1, 0, 0, NO_CAP)))
    return Memory(*map(kernel.copy, memory))
