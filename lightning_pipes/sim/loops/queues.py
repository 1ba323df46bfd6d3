"""Operations of open order: their dependencies, and the queues from which ranks pick."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from lightning_pipes.ir import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Instruction,
    Kind,
    Plan,
    Rule,
    batch_instructions,
    needs,
    ready_key,
    send_of,
)
from lightning_pipes.sim.loops import kernel
from lightning_pipes.sim.loops.jit import rebind_globals
from lightning_pipes.sim.loops.kernel import FORWARDS, KERNEL, OTHERS, PLENTY, WEIGHTS
from lightning_pipes.sim.loops.operations import (
    Bytes,
    OperationLog,
    OperationNumbers,
    Operations,
    Prices,
    flatten_lists,
)
from lightning_pipes.sim.loops.tables import Beginning, Graph, Held, Queued, Ran, Status, Table

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

    timed: OperationLog
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
    run = DispatchRun(OperationLog(*ran, turn), ready, Held(by.copy(memory.held), by.copy(memory.held)), n)
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


_QUEUES = {Kind.F: 0, Kind.B: 1, Kind.I: 1, Kind.W: 2, Kind.STEP: 3}
"""The queue of a stage in which each kind waits; B and I never meet."""


@lru_cache(maxsize=16)
def open_queues(plan: Plan, batches: int) -> Queues:
    """Return the operations of the first `batches` batches of every job; the computations of a rank in order of
    `ready_key`.

    What waits for something that these batches do not hold waits forever.
    """
    instructions: list[Instruction] = []
    sends: list[Instruction] = []
    for rank in range(plan.n_ranks):
        mine = [
            i
            for job in range(len(plan.jobs))
            for batch in range(batches)
            for i in batch_instructions(plan, rank, job, batch)
        ]
        instructions += sorted((i for i in mine if i.kind in COMPUTE), key=ready_key)
        sends += [i for i in mine if i.kind in SENDS]
    instructions += sends
    number = {i: n for n, i in enumerate(instructions)}

    numbering = OperationNumbers(plan)
    ranks, links, groups = [], [], []
    waiting = []
    after: list[list[int]] = [[] for _ in instructions]
    pool, rows = [], []
    members: list[list[int]] = [[] for _ in range(4 * plan.n_stages)]
    forwards = {stage: 4 * n for n, stage in enumerate(s for stages in plan.stages for s in stages)}
    for n, i in enumerate(instructions):
        rank = plan.rank_of(i)
        link, group = numbering.assign_numbers(i, rank)
        ranks.append(rank)
        links.append(link)
        groups.append(group)
        pool.append(forwards[i.stage])
        rows.append(i.span.rows if i.kind is Kind.F else -i.span.rows if i.kind in (Kind.B, Kind.W) else 0)
        if i.kind in COMPUTE:
            members[forwards[i.stage] + _QUEUES[i.kind]].append(n)
        unmet = _without_receives(i, plan)
        waiting.append(len(unmet))
        for needed in unmet:
            if needed in number:
                after[number[needed]].append(n)
    for followers in after:
        if len(followers) > 1:  # messages that are complete at one instant leave in this order
            followers.sort(key=instructions.__getitem__)
    return Queues(
        plan,
        tuple(instructions),
        tuple(numbering.like),
        numbering.link_pairs,
        Table(Graph(ranks, links, groups, *flatten_lists(after))),
        waiting=waiting,
        members=members,
        owner=[rank for rank, stages in enumerate(plan.stages) for _ in range(4 * len(stages))],
        forwards=forwards,
        pool=pool,
        rows=rows,
        in_order=False,
    )


def _without_receives(i: Instruction, plan: Plan) -> list[Instruction]:
    """Return the instructions that `i` needs; for a receive, those that it needs, which is its send where the plan
    demands nothing else."""
    out = []
    for n in needs(i, plan):
        if n.kind not in RECEIVES:
            out.append(n)
        elif plan.after:
            out += _without_receives(n, plan)
        else:
            out.append(send_of(n))
    return out
