"""The structures that the solvers' kernel takes.

Every field is a list of whole numbers, or for compiled code an int64 array; a letter says by what it is listed: o is a
block, j a job, s a stage, d a depth of the search tree. `ArrayProblem.read` makes `Blocks`; what the kernel writes is
made for each run by its `Kernel`.
"""

from __future__ import annotations

from typing import NamedTuple

from lightning_pipes.sim.loops.tables import Numbers


class Blocks(NamedTuple):
    """The blocks that are to be ordered: o = 2 jobs s + j is the forward of job j on stage s, `jobs` more its backward.

    Attributes:
        jobs, n: how many jobs and blocks there are.
        busy: (o) how long it takes its stage.
        lag: (o) how long after its start the job's next block may start.
        tail: (o) how long it takes at least from its start to the end of its job.
        saved: (o) what of `busy` is saved where the next block on the stage is one of the same job, its backward.
    """

    jobs: int
    n: int
    busy: Numbers
    lag: Numbers
    tail: Numbers
    saved: Numbers


class Urgency(NamedTuple):
    """The block that a free stage takes first: the one with the smallest number, all of them different.

    Attributes:
        first, second: (j) the number of a job's forwards, and of its backwards.
    """

    first: Numbers
    second: Numbers


class Notes(NamedTuple):
    """The notes of `kernel.list_schedule`.

    Attributes:
        active: the jobs that are ordered; the first k count.
        need: (s) the least time from the start of its first block to the end of these jobs.
        ready: (o) when it may start as far as its job is concerned.
        free, soon: (s) when it is free, and when it can begin its next block.
        left: (s) what remains of `need`.
        known: the first `count[s]` of `known[2 jobs s :]` are the blocks of stage s whose `ready` is known.
        count: (s) see `known`.
        last: (s) the block that it has run last, -1 for none.
    """

    active: Numbers
    need: Numbers
    ready: Numbers
    free: Numbers
    soon: Numbers
    left: Numbers
    known: Numbers
    count: Numbers
    last: Numbers


class Style(NamedTuple):
    """An order by the places of jobs.

    Attributes:
        there, back: (j) its place among forwards, and among backwards.
        rule: [what goes first, patience, what comes of it]; first go 0 backwards, 1 forwards, 2 the smaller
            place, and a stage waits for a better block for as long as the patience.
    """

    there: Numbers
    back: Numbers
    rule: Numbers


class Chance(NamedTuple):
    """How a search goes.

    Attributes:
        target: nanoseconds at which nothing is left to find.
        luck: minus the logarithms of numbers from 0 to 1, in units of 1 / `kernel.SCALE`.
        heat: the first temperature is the value over this.
        total: evaluations until the temperature is 0.
        rng: [the state of the generator of random numbers].
    """

    target: int
    luck: Numbers
    heat: int
    total: int
    rng: Numbers


class Sequence(NamedTuple):
    """The blocks of each stage in order, stage by stage.

    Attributes:
        blocks: block numbers.
        place: (o) where it stands: `blocks[place[o]]` is o.
    """

    blocks: Numbers
    place: Numbers


class Path(NamedTuple):
    """The times of a sequence.

    Attributes:
        starts: (o) when it starts.
        cause: (o) the block that it had to wait for, -1 for none.
    """

    starts: Numbers
    cause: Numbers


class Sweep(NamedTuple):
    """The notes of `kernel.time_sequence`.

    Attributes:
        queue: blocks that wait for nothing any more.
        unmet: (o) how many others it waits for.
    """

    queue: Numbers
    unmet: Numbers


class Begun(NamedTuple):
    """A partial order.

    Attributes:
        step, ready: (j) how many of its blocks have begun, and when its next one can start.
        free, held: (s) when it is free, and the block that it is held for, -1 for none.
        last: (s) the block that it has run last, -1 for none.
    """

    step: Numbers
    ready: Numbers
    free: Numbers
    held: Numbers
    last: Numbers


class Rest(NamedTuple):
    """The notes of `kernel.bound_rest`.

    Attributes:
        head: (o) when it can start at the earliest, of blocks that have not begun.
        some_head, some_busy, some_tail: those of one stage, for `kernel.one_machine`.
    """

    head: Numbers
    some_head: Numbers
    some_busy: Numbers
    some_tail: Numbers


class Tree(NamedTuple):
    """The search tree from its root to where the search is, rows by depth.

    Attributes:
        steps, readies, frees, holds, lasts: the fields of a `Begun`.
        lows: when what has begun ends at the earliest.
        counts: how many children are left.
        children, promises: their blocks and the least times that these promise, the best last.
    """

    steps: Numbers
    readies: Numbers
    frees: Numbers
    holds: Numbers
    lasts: Numbers
    lows: Numbers
    counts: Numbers
    children: Numbers
    promises: Numbers
