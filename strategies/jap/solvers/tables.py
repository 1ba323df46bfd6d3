"""The data structures of the solvers' kernel.

Every field is a list of integers, or an int64 array for compiled code. A letter in parentheses specifies the index of a
field: o is a block, j a job, s a stage, and d a depth of the search tree. `ArrayProblem.read` creates the `Blocks`. The
structures that the kernel writes to are created for each run by its `Kernel`. All times are in nanoseconds.
"""

from __future__ import annotations

from typing import NamedTuple

from lightning_pipes.sim.loops.tables import Numbers


class Blocks(NamedTuple):
    """The blocks to order. The forward of job j on stage s has the number o = 2 jobs s + j, and its backward o + jobs.

    Attributes:
        jobs, n: the number of jobs, and the number of blocks.
        busy: (o) the time for which the block occupies its stage.
        lag: (o) the time from its start to the earliest start of the job's next block.
        tail: (o) the shortest time from its start to the end of its job.
        saved: (o) the part of `busy` that is saved if the next block on the stage is the backward of the same job.
    """

    jobs: int
    n: int
    busy: Numbers
    lag: Numbers
    tail: Numbers
    saved: Numbers


class Urgency(NamedTuple):
    """The urgencies of the blocks.

    A free stage runs the block with the smallest number first, and all numbers are different.

    Attributes:
        first, second: (j) the number of the job's forwards, and of its backwards.
    """

    first: Numbers
    second: Numbers


class Notes(NamedTuple):
    """The working memory of `kernel.list_schedule`.

    Attributes:
        active: the jobs to order, of which the first k count.
        need: (s) the shortest time from the start of the stage's first block to the end of these jobs.
        ready: (o) the earliest start that the block's job allows.
        free, soon: (s) the time when the stage is free, and the time when it can begin its next block.
        left: (s) the remaining part of `need`.
        known: the first `count[s]` entries of `known[2 jobs s :]` are the blocks of stage s whose `ready` is known.
        count: (s) see `known`.
        last: (s) the last block that the stage has run, -1 for none.
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
    """An order that is given by the places of the jobs.

    Attributes:
        there, back: (j) the place of the job among forwards, and among backwards.
        rule: [what goes first, patience, makespan]. The first number is 0 for backwards, 1 for forwards, and 2 for the
            smaller place. The patience is the time that a stage may wait for a better block.
    """

    there: Numbers
    back: Numbers
    rule: Numbers


class Chance(NamedTuple):
    """The settings of a random search.

    Attributes:
        target: the makespan at which the search ends.
        luck: minus the logarithms of numbers from 0 to 1, in units of 1 / `kernel.LUCK_SCALE`.
        heat: the divisor of the makespan that gives the first temperature.
        total: the number of evaluations after which the temperature is 0.
        rng: [the state of the random number generator].
    """

    target: int
    luck: Numbers
    heat: int
    total: int
    rng: Numbers


class Sequence(NamedTuple):
    """The order of the blocks of each stage, stage by stage.

    Attributes:
        blocks: the block numbers in this order.
        place: (o) the index of the block in `blocks`, so that `blocks[place[o]]` is o.
    """

    blocks: Numbers
    place: Numbers


class Path(NamedTuple):
    """The times of a sequence.

    Attributes:
        starts: (o) the start of the block.
        cause: (o) the block for which it had to wait, -1 for none.
    """

    starts: Numbers
    cause: Numbers


class Sweep(NamedTuple):
    """The working memory of `kernel.time_sequence`.

    Attributes:
        queue: the blocks whose predecessors have all been timed.
        unmet: (o) the number of predecessors of the block that have not been timed.
    """

    queue: Numbers
    unmet: Numbers


class Begun(NamedTuple):
    """A partial order.

    Attributes:
        step, ready: (j) the number of the job's blocks that have begun, and the earliest start of its next block.
        free, held: (s) the time when the stage is free, and the block for which it is reserved, -1 for none.
        last: (s) the last block that the stage has run, -1 for none.
    """

    step: Numbers
    ready: Numbers
    free: Numbers
    held: Numbers
    last: Numbers


class Rest(NamedTuple):
    """The working memory of `kernel.bound_rest`.

    Attributes:
        head: (o) the earliest start of each block that has not begun.
        some_head, some_busy, some_tail: the values of the blocks of one stage, for `kernel.one_machine`.
    """

    head: Numbers
    some_head: Numbers
    some_busy: Numbers
    some_tail: Numbers


class Tree(NamedTuple):
    """The search tree from its root to the current node, with one row per depth.

    Attributes:
        steps, readies, frees, holds, lasts: the fields of a `Begun`.
        lows: (d) a lower bound of the makespan, from the blocks that have begun.
        counts: (d) the number of children that are left.
        children, promises: the blocks of the children, and the lower bounds of their makespans, with the best child
            last.
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
