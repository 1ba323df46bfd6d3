"""Operations whose order is open: their dependencies, and the queues from which ranks pick."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_pipes.ir import Kind, Rule
from lightning_pipes.sim.loops import kernel
from lightning_pipes.sim.loops.jit import rebind_globals
from lightning_pipes.sim.loops.kernel import FORWARDS, KERNEL, OTHERS, PLENTY, WEIGHTS
from lightning_pipes.sim.loops.memory import Bytes
from lightning_pipes.sim.loops.operations import Operations, Prices, Timed, flatten_lists
from lightning_pipes.sim.loops.tables import Beginning, Held, Queued, Ran, Status, Table

EARLIEST = Rule(alternate=False)
EFFORT = 8
"""The time that an operation costs the kernel where it is chosen, over what it costs in a fixed order."""


@dataclass(frozen=True, eq=False)
class Queues(Operations):
    """Operations that run as they become ready. `table` has what each holds up.

    Attributes:
        waiting: how many others each operation waits for.
        members: the computations of each queue, earliest first; the queues of a rank in a row.
        owner: the rank of each queue.
        forwards: the queue of each stage's forwards, where their samples are counted.
        pool: that of the operation's stage.
        rows: samples that each operation adds to those, negative for those that it takes off.
        in_order: whether a queue gives its next member or nothing; if not, the first that is ready.
    """

    waiting: list[int]
    members: list[list[int]]
    owner: list[int]
    forwards: dict[int, int]
    pool: list[int]
    rows: list[int]
    in_order: bool

    @cached_property
    def queue_table(self) -> Table[Queued]:
        """The queue of each operation, and the order in the queues."""
        queue = [0] * len(self.instructions)
        for q, members in enumerate(self.members):
            for i in members:
                queue[i] = q
        sort = [OTHERS] * len(self.members)
        for q, members in enumerate(self.members):
            if members and self.instructions[members[0]].kind is Kind.W:
                sort[q] = WEIGHTS
        for q in self.forwards.values():
            sort[q] = FORWARDS
        queues = [sum(r < rank for r in self.owner) for rank in range(self.plan.n_ranks + 1)]
        return Table(Queued(queue, self.pool, self.rows, queues, sort, flatten_lists(self.members)[1]))

    @cached_property
    def initial_table(self) -> Table[Beginning]:
        """The number of operations that each one waits for, where each queue begins, and how many of it are ready."""
        ready = [sum(not self.waiting[i] for i in members) for members in self.members]
        return Table(Beginning(self.waiting, flatten_lists(self.members)[0][:-1], ready))


@dataclass
class DispatchRun:
    """The results of operations; lists or arrays, to which the kernel writes.

    Attributes:
        timed: when they run.
        ready: what could run next.
        held: the ranks' bytes.
        left: how many could not run.
    """

    timed: Timed
    ready: Status
    held: Held
    left: int


Pick = Callable[[int, int, int, int, bool, bool], int]
"""See `kernel.pick`."""


def run_queues(
    queues: Queues,
    prices: Prices,
    memory: Bytes,
    *,
    room: Sequence[int] = (),
    rule: Rule = EARLIEST,
    picker: Callable[[DispatchRun], Pick] | None = None,
) -> DispatchRun:
    """Run `queues` as far as possible.

    Args:
        room: samples that each queue of forwards may take; empty means any number.
        rule: the kernel's; its limits are in `room`.
        picker: makes what picks instead of that rule, and may look at the run meanwhile.
    """
    n = len(queues.instructions)
    by = KERNEL.select(EFFORT * n) if picker is None else KERNEL.python
    may_take = by.copy(room or [PLENTY] * len(queues.members))
    waiting, low, count = map(by.copy, by.read(queues.initial_table))
    ready = Status(waiting, low, count, may_take)
    ran, turn = Ran(by.fill(n), by.fill(n)), by.fill(n)
    run = DispatchRun(Timed(*ran, turn), ready, Held(by.copy(memory.held), by.copy(memory.held)), n)
    chosen = by.run.chosen if picker is None else rebind_globals(kernel.chosen, pick=picker(run))
    run.left = chosen(
        by.read(queues.table),
        by.read(queues.queue_table),
        ready,
        by.read(prices.table),
        by.read(memory.table),
        run.held,
        queues.make_wires(by),
        ran,
        turn,
        rule.alternate,
        rule.weights_last,
        queues.in_order,
    )
    return run
