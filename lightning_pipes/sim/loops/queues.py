"""Operations without a fixed order: their dependencies, and the queues from which ranks pick."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from lightning_pipes.ir import (
    COMPUTE_KINDS,
    RECEIVE_KINDS,
    SEND_KINDS,
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
from lightning_pipes.sim.loops.kernel import FORWARD_KIND, OTHER_KIND, SIMULATION_KERNELS, UNLIMITED, WEIGHT_KIND
from lightning_pipes.sim.loops.operations import (
    Bytes,
    OperationLog,
    OperationNumbers,
    Operations,
    Prices,
    flatten_lists,
)
from lightning_pipes.sim.loops.tables import Beginning, Graph, Held, Queued, Ran, Status, Table

EARLIEST_RULE = Rule(alternate=False)
CHOICE_COST = 8
"""The cost of an operation in the kernel `run_chosen_order` divided by its cost in the kernel `run_fixed_order`."""


@dataclass(frozen=True, eq=False)
class Queues(Operations):
    """Operations that run when they become ready. `table` contains for each operation the operations that it holds up.

    Attributes:
        waiting: the number of operations for which each operation waits.
        members: the computations of each queue, the earliest first. The queues of a rank are consecutive.
        owner: the rank of each queue.
        forwards: for each stage, the queue of its forwards, in which the samples of the stage are counted.
        pool: for each operation, the queue of the forwards of its stage.
        rows: the number of samples that each operation adds to its pool; negative if it removes samples.
        in_order: whether a queue offers only its next member. Otherwise, it offers the first member that is ready.
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
        """The queue of each operation, and the order of the operations in the queues."""
        queue = [0] * len(self.instructions)
        for q, members in enumerate(self.members):
            for i in members:
                queue[i] = q
        sort = [OTHER_KIND] * len(self.members)
        for q, members in enumerate(self.members):
            if members and self.instructions[members[0]].kind is Kind.W:
                sort[q] = WEIGHT_KIND
        for q in self.forwards.values():
            sort[q] = FORWARD_KIND
        queues = [sum(r < rank for r in self.owner) for rank in range(self.plan.n_ranks + 1)]
        return Table(Queued(queue, self.pool, self.rows, queues, sort, flatten_lists(self.members)[1]))

    @cached_property
    def initial_table(self) -> Table[Beginning]:
        """The state before any operation has run, see `Beginning`."""
        ready = [sum(not self.waiting[i] for i in members) for members in self.members]
        return Table(Beginning(self.waiting, flatten_lists(self.members)[0][:-1], ready))


@dataclass
class DispatchRun:
    """The results of a run, in lists or arrays that the kernel modifies.

    Attributes:
        timed: the start and end of each operation.
        ready: the operations that can run next.
        held: the bytes that the ranks hold.
        left: the number of operations that have not run.
    """

    timed: OperationLog
    ready: Status
    held: Held
    left: int


Pick = Callable[[int, int, int, int, bool, bool], int]
"""A function with the signature of `kernel.pick`."""


def run_queues(
    queues: Queues,
    prices: Prices,
    memory: Bytes,
    *,
    room: Sequence[int] = (),
    rule: Rule = EARLIEST_RULE,
    picker: Callable[[DispatchRun], Pick] | None = None,
) -> DispatchRun:
    """Run the operations of `queues` until no more operations can run.

    Args:
        queues: the operations.
        prices: their durations.
        memory: the bytes of the operations and ranks.
        room: the number of samples that each queue of forwards may hold; empty for no limit.
        rule: the rule of the kernel. Its limits must be included in `room`.
        picker: creates a function that replaces the rule. The function may read the run while it is in progress.
    """
    n = len(queues.instructions)
    by = SIMULATION_KERNELS.select(CHOICE_COST * n) if picker is None else SIMULATION_KERNELS.python
    may_take = by.copy(room or [UNLIMITED] * len(queues.members))
    waiting, low, count = map(by.copy, by.read(queues.initial_table))
    ready = Status(waiting, low, count, may_take)
    ran, turn = Ran(by.fill(n), by.fill(n)), by.fill(n)
    run = DispatchRun(OperationLog(*ran, turn), ready, Held(by.copy(memory.held), by.copy(memory.held)), n)
    chosen = by.run.run_chosen_order
    if picker is not None:
        chosen = rebind_globals(kernel.run_chosen_order, pick_operation=picker(run))
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
"""The queue of a stage that contains each kind. No plan has both B and I."""


@lru_cache(maxsize=16)
def open_queues(plan: Plan, batches: int) -> Queues:
    """Return the operations of the first `batches` batches of every job.

    The computations of each rank are sorted by `ready_key`. An operation that needs an instruction outside these
    batches never becomes ready.
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
        instructions += sorted((i for i in mine if i.kind in COMPUTE_KINDS), key=ready_key)
        sends += [i for i in mine if i.kind in SEND_KINDS]
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
        if i.kind in COMPUTE_KINDS:
            members[forwards[i.stage] + _QUEUES[i.kind]].append(n)
        unmet = _without_receives(i, plan)
        waiting.append(len(unmet))
        for needed in unmet:
            if needed in number:
                after[number[needed]].append(n)
    for followers in after:
        if len(followers) > 1:  # messages that become complete at the same time leave in this order
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
    """Return the instructions that `i` needs, in which each receive is replaced by the instructions that it needs.

    A receive needs only its send, unless the plan contains additional dependencies.
    """
    out = []
    for n in needs(i, plan):
        if n.kind not in RECEIVE_KINDS:
            out.append(n)
        elif plan.after:
            out += _without_receives(n, plan)
        else:
            out.append(send_of(n))
    return out
