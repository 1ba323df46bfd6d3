"""Compute the times of a fixed order as the longest path through the constraints of ranks, links and the data flow.

Ranks run their rows in order, and links serve messages in the order in which they were sent. The order on every
resource is therefore known in advance, and one pass over the instructions, in any order that respects all constraints,
computes every start. The only exception is a wire that several ranks share, because the order of their messages depends
on time. In this case, each row is run as a queue.

Programs of regular plans are compiled without evaluating the needs of each micro-batch. If every stage, direction and
link cuts a batch in the same way, micro-batches are independent until the STEP, and all of them need and send the same
messages as the first one. `ir.needs` and `ir.lowering.sends_after` are therefore called only once for each kind and
stage, which makes compiling large plans more than ten times faster.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lightning_pipes.ir import (
    RECEIVE_KINDS,
    SEND_KINDS,
    CostKey,
    Instruction,
    Kind,
    Plan,
    PlanError,
    Program,
    add_recomputations,
    cost_key,
    deadlock_error,
    lower,
    needs,
    send_of,
)
from lightning_pipes.ir.lowering import sends_after
from lightning_pipes.ir.program import remember_results
from lightning_pipes.ir.regular import IrregularError, Unit, is_regular, walk_program
from lightning_pipes.ir.verify import check_program_matches_plan, describe_absent_needs
from lightning_pipes.sim.loops import kernel
from lightning_pipes.sim.loops.jit import rebind_globals
from lightning_pipes.sim.loops.kernel import EARLIEST_TIME, SIMULATION_KERNELS
from lightning_pipes.sim.loops.operations import (
    Bytes,
    OperationLog,
    OperationNumbers,
    Operations,
    Prices,
    flatten_lists,
)
from lightning_pipes.sim.loops.queues import Queues, run_queues
from lightning_pipes.sim.loops.tables import Array, Graph, Ran, Table, Wires


@dataclass(frozen=True)
class NumberedOperations:
    """Computations and sends, each after all operations for which it waits.

    Attributes:
        instructions: the instruction of each operation.
        ranks: the rank that runs each operation.
        links: the link of each send; -1 for a computation.
        groups: the group of each operation, as an index into `like`.
        first, before: `before[first[i] : first[i + 1]]` are the messages for which operation i waits. All other
            dependencies follow from the order of its rank.
        like: one instruction for each group of operations with the same cost.
        pairs: (from rank, to rank) of every link.
    """

    instructions: list[Instruction] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    links: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=lambda: [0])
    before: list[int] = field(default_factory=list)
    like: list[Instruction] = field(default_factory=list)
    pairs: list[tuple[int, int]] = field(default_factory=list)


class _Costs(NamedTuple):
    """The numbers of all micro-batches of one computation."""

    messages: tuple[list[int], ...]  # positions of the messages that it needs, by micro-batch
    sends: tuple[_Send, ...]
    groups: dict[CostKey, int]


class _Send(NamedTuple):
    places: list[int]
    kind: Kind
    stage: int
    link: int
    groups: dict[int, int]


def number_regular(program: Program, plan: Plan) -> NumberedOperations | None:
    """Return the operations of the finite `program`, which must not contain transfers.

    The result is None if the plan is not regular, or if the program can't run. The reason is then found by checking
    each instruction.
    """
    return _Numbering(plan).run(add_recomputations(program, plan)) if is_regular(program, plan) else None


class _Numbering:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._found = NumberedOperations()
        self._places: dict[tuple[Kind, int, int, int], list[int]] = {}  # positions of messages
        self._links: dict[tuple[int, int], int] = {}

    def run(self, program: Program) -> NumberedOperations | None:
        found = self._found
        instructions, ranks, links, groups = found.instructions, found.ranks, found.links, found.groups
        first, before, like = found.first, found.before, found.like
        by_rows = not self._plan.kept_microbatches  # the number of rows is the `cost_key`
        try:
            for rank, i, unit, n in walk_program(program, self._plan):
                costs = unit.note
                if costs is None:
                    costs = unit.note = self._costs(i, unit)
                assert isinstance(costs, _Costs)
                for places in costs.messages:
                    before.append(places[n])
                start, stop = i[4]
                same = stop - start if by_rows else cost_key(i, self._plan)
                group = costs.groups.get(same)
                if group is None:
                    group = costs.groups[same] = len(like)
                    like.append(i)
                instructions.append(i)
                ranks.append(rank)
                links.append(-1)
                groups.append(group)
                first.append(len(before))
                for places, kind, stage, link, known in costs.sends:
                    send = Instruction(kind, stage, i[2], i[3], i[4])
                    group = known.get(stop - start)
                    if group is None:
                        group = known[stop - start] = len(like)
                        like.append(send)
                    places[n] = len(instructions)
                    instructions.append(send)
                    ranks.append(rank)
                    links.append(link)
                    groups.append(group)
                    first.append(len(before))
        except IrregularError:
            return None
        return found

    def _costs(self, i: Instruction, unit: Unit) -> _Costs:
        """Return the messages that all micro-batches like `i` need and send."""
        received = {n[:4]: n for n in needs(i, self._plan) if n.kind in RECEIVE_KINDS}.values()
        messages = tuple(self._find_positions(send_of(n), len(unit.ran)) for n in received)
        sends = tuple(
            _Send(self._find_positions(s, len(unit.ran)), s.kind, s.stage, self._link(s), {})
            for s in sends_after(i, self._plan)
            if s.span == i.span
        )
        return _Costs(messages, sends, {})

    def _find_positions(self, send: Instruction, count: int) -> list[int]:
        """Return the positions of the messages like `send`."""
        return self._places.setdefault(send[:4], [-1] * count)

    def _link(self, i: Instruction) -> int:
        pair = (self._plan.rank_of(i), self._plan.target_rank(i))
        link = self._links.setdefault(pair, len(self._links))
        if link == len(self._found.pairs):
            self._found.pairs.append(pair)
        return link


@dataclass(frozen=True, eq=False)
class CompiledProgram(Operations):
    """A lowered program: its operations in an order in which each one comes after all operations for which it waits.

    `table` contains the dependencies in addition to the order of ranks and links.
    """

    @cached_property
    def lowered_as_usual(self) -> bool:
        """Whether every send directly follows its computation, so that no send waits for anything else."""
        work = self.table.lists
        return not any(x >= 0 and work.first[i] < work.first[i + 1] for i, x in enumerate(work.link))

    @cached_property
    def rows(self) -> Queues:
        """The same operations with one queue for each rank, its row.

        The rank runs the first operation as soon as possible.
        """
        rank, link, group, first, before = self.table.lists
        waits: list[list[int]] = []
        latest = [-1] * self.plan.n_ranks  # the last computation of each rank so far
        carried: list[list[int]] = [[] for _ in latest]  # operations for which sends of the rank have waited since then
        rows: list[list[int]] = [[] for _ in latest]
        for i, r in enumerate(rank):
            own = before[first[i] : first[i + 1]]
            if link[i] < 0:
                waits.append([*own, *carried[r]])
                carried[r] = []
                latest[r] = i
                rows[r].append(i)
            else:
                carried[r] += own
                waits.append([*carried[r], latest[r]] if latest[r] >= 0 else carried[r].copy())
        after: list[list[int]] = [[] for _ in rank]
        for i, those in enumerate(waits):
            for n in those:
                after[n].append(i)
        return Queues(
            self.plan,
            self.instructions,
            self.like,
            self.pairs,
            Table(Graph(rank, link, group, *flatten_lists(after))),
            waiting=[len(those) for those in waits],
            members=rows,
            owner=list(range(self.plan.n_ranks)),
            forwards={},
            pool=rank,
            rows=[0] * len(rank),
            in_order=True,
        )


@remember_results(8)
def compile_program(program: Program, plan: Plan) -> CompiledProgram:
    """Return the finite `program` with its transfers, ready to be simulated.

    Raises:
        ProgramError: the program belongs to another plan.
        DeadlockError: ranks wait for each other, or for instructions that no rank runs.
    """
    quick = number_regular(program, plan)
    if quick is not None:
        table = Table(Graph(quick.ranks, quick.links, quick.groups, quick.first, quick.before))
        return CompiledProgram(plan, tuple(quick.instructions), tuple(quick.like), tuple(quick.pairs), table)
    check_program_matches_plan(program, plan)
    lowered = lower(program, plan)
    number: dict[Instruction, int] = {}  # position in `kept`; a receive has the position of its send
    kept: list[Instruction] = []
    ranks: list[int] = []
    links: list[int] = []
    groups: list[int] = []
    before: list[list[int]] = []
    numbering = OperationNumbers(plan)
    # operations for which receives have waited since the rank's last operation
    arrived: list[list[int]] = [[] for _ in range(plan.n_ranks)]
    at = [0] * plan.n_ranks
    sleepers: dict[Instruction, list[int]] = {}  # the ranks that wait for each instruction
    awake = list(range(plan.n_ranks - 1, -1, -1))
    while awake:
        rank = awake.pop()
        row = lowered.head[rank]
        while at[rank] < len(row):
            i = row[at[rank]]
            foreign = []  # dependencies that the rank's own order does not imply
            for n in needs(i, plan):
                position = number.get(n)
                if position is None:
                    sleepers.setdefault(n, []).append(rank)
                    break
                if plan.rank_of(n) != rank or n.kind in SEND_KINDS:
                    foreign.append(position)
            else:
                at[rank] += 1
                if i in sleepers:
                    awake += sleepers.pop(i)
                if i.kind in RECEIVE_KINDS:
                    number[i] = foreign[-1]  # its send
                    arrived[rank] += foreign
                    continue
                link, group = numbering.assign_numbers(i, rank)
                number[i] = len(kept)
                kept.append(i)
                ranks.append(rank)
                links.append(link)
                groups.append(group)
                before.append([*arrived[rank], *foreign])
                arrived[rank].clear()
                continue
            break
    stuck = {rank: row[at[rank]] for rank, row in enumerate(lowered.head) if at[rank] < len(row)}
    if stuck:
        raise deadlock_error(number, stuck, plan, describe_absent_needs(lowered, plan, stuck.values()))
    table = Table(Graph(ranks, links, groups, *flatten_lists(before)))
    return CompiledProgram(plan, tuple(kept), tuple(numbering.like), numbering.link_pairs, table)


def run(order: CompiledProgram, prices: Prices) -> OperationLog:
    """Return the start and end of every operation of `order`.

    Raises:
        PlanError: several ranks share a wire, sends block, and the transfers of the program were placed by hand.
    """
    n = len(order.instructions)
    if prices.crowded:
        if any(prices.table.lists.blocks) and not order.lowered_as_usual:
            raise PlanError(
                "the program contains transfers, which can't be timed if several ranks share a wire and sends block; "
                "pass the program without transfers"
            )
        return run_queues(order.rows, prices, Bytes.create_untracked(order)).timed
    by = SIMULATION_KERNELS.select(n)
    ran = Ran(by.fill(n), by.fill(n))
    clock = by.fill(order.plan.n_ranks)
    by.run.run_fixed_order(by.read(order.table), by.read(prices.table), clock, order.make_wires(by), ran)
    return OperationLog(*ran, range(n))


def ends_under(order: CompiledProgram, prices: Prices, busy: Array) -> Array:
    """Return the makespan of `order` in nanoseconds under many costs.

    Args:
        order: the operations.
        prices: the properties of operations and links that all cases share.
        busy: nanoseconds by group, one row for each case.
    """
    n, k = len(order.instructions), len(busy)
    by = SIMULATION_KERNELS.select(n * k)
    if prices.crowded:
        return np.array([run(order, case).makespan for case in prices.with_times(busy)], np.int64)
    last = np.zeros(k, np.int64)
    if by.takes_arrays:
        cases = prices.table.arrays._replace(busy=np.ascontiguousarray(busy), quick=prices.peak_rate_times(busy))
        ran = Ran(by.fill(n), by.fill(n))
        by.run.run_many_costs(order.table.arrays, cases, by.fill(order.plan.n_ranks), order.make_wires(by), ran, last)
        return last

    def rows(size: int) -> Array:
        return np.zeros((size, k), np.int64)

    links = len(order.pairs)
    wires = Wires(rows(links), rows(links) + EARLIEST_TIME, [0] * links, rows(order.message_offsets[-1]))
    ran, clock = Ran(rows(n), rows(n)), rows(order.plan.n_ranks)
    cases = prices.table.lists._replace(busy=busy.T, quick=prices.peak_rate_times(busy).T)
    departure = rebind_globals(kernel.compute_departure, max=np.maximum)
    at_once = rebind_globals(kernel.run_fixed_order, max=np.maximum, compute_departure=departure)
    at_once(order.table.lists, cases, clock, wires, ran)
    ran.ends.max(axis=0, initial=0, out=last)
    return last
