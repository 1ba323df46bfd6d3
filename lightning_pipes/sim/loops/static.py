"""A fixed order in time: the longest path through what each rank, each link and the data flow demand.

Ranks run their rows in order and links serve messages in the order in which they were sent, so every resource's order
is known in advance and one pass over the instructions, in any order that respects them all, gives every start. Only
where several ranks share a wire their messages' order depends on time; then the rows are run as a queue each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lightning_pipes.ir import RECEIVES, SENDS, Instruction, Plan, PlanError, Program, deadlock_error, lower, needs
from lightning_pipes.ir.deadlock import check_program_matches_plan, describe_absent_needs
from lightning_pipes.ir.program import remember_results
from lightning_pipes.sim.loops import kernel
from lightning_pipes.sim.loops.jit import rebind_globals
from lightning_pipes.sim.loops.kernel import KERNEL, LONG_AGO
from lightning_pipes.sim.loops.memory import Bytes
from lightning_pipes.sim.loops.operations import Numbering, Operations, Prices, Timed, flatten_lists
from lightning_pipes.sim.loops.queues import Queues, run_queues
from lightning_pipes.sim.loops.regular import number_regular
from lightning_pipes.sim.loops.tables import Array, Graph, Ran, Table, Wires


@dataclass(frozen=True, eq=False)
class Compiled(Operations):
    """A lowered program: operations in an order in which each comes after all that it waits for. `table` has what they
    wait for besides their rank and link."""

    @cached_property
    def lowered_as_usual(self) -> bool:
        """Whether every send directly follows its computation: no send waits for anything else."""
        work = self.table.lists
        return not any(x >= 0 and work.first[i] < work.first[i + 1] for i, x in enumerate(work.link))

    @cached_property
    def rows(self) -> Queues:
        """The same operations where each rank has a queue, its row; it runs the first of it as soon as it can."""
        rank, link, group, first, before = self.table.lists
        waits: list[list[int]] = []
        latest = [-1] * self.plan.n_ranks  # the last computation of each rank
        carried: list[list[int]] = [[] for _ in latest]  # what sends of the rank have waited for since then
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
def compile_program(program: Program, plan: Plan) -> Compiled:
    """The finite `program` with its transfers, ready to be timed.

    Raises:
        ProgramError: the program is one of another plan.
        DeadlockError: ranks wait for each other, or for what nobody runs.
    """
    quick = number_regular(program, plan)
    if quick is not None:
        table = Table(Graph(quick.ranks, quick.links, quick.groups, quick.first, quick.before))
        return Compiled(plan, tuple(quick.instructions), tuple(quick.like), tuple(quick.pairs), table)
    check_program_matches_plan(program, plan)
    lowered = lower(program, plan)
    number: dict[Instruction, int] = {}  # position in `kept`; of a receive, that of its send
    kept: list[Instruction] = []
    ranks: list[int] = []
    links: list[int] = []
    groups: list[int] = []
    before: list[list[int]] = []
    numbering = Numbering(plan)
    arrived: list[list[int]] = [[] for _ in range(plan.n_ranks)]  # awaited by receives since the rank's last step
    at = [0] * plan.n_ranks
    sleepers: dict[Instruction, list[int]] = {}  # ranks that wait for an instruction
    awake = list(range(plan.n_ranks - 1, -1, -1))
    while awake:
        rank = awake.pop()
        row = lowered.head[rank]
        while at[rank] < len(row):
            i = row[at[rank]]
            foreign = []  # what the rank's own order does not imply
            for n in needs(i, plan):
                position = number.get(n)
                if position is None:
                    sleepers.setdefault(n, []).append(rank)
                    break
                if plan.rank_of(n) != rank or n.kind in SENDS:
                    foreign.append(position)
            else:
                at[rank] += 1
                if i in sleepers:
                    awake += sleepers.pop(i)
                if i.kind in RECEIVES:
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
    return Compiled(plan, tuple(kept), tuple(numbering.like), numbering.link_pairs, table)


def run(order: Compiled, prices: Prices) -> Timed:
    """When every operation of `order` runs."""
    n = len(order.instructions)
    if prices.crowded:
        if any(prices.table.lists.blocks) and not order.lowered_as_usual:
            raise PlanError(
                "several ranks share a wire, sends block, and the program places its transfers by hand, which can't be "
                "timed; give the program without transfers"
            )
        return run_queues(order.rows, prices, Bytes.untracked(order)).timed
    by = KERNEL.select(n)
    ran = Ran(by.fill(n), by.fill(n))
    clock = by.fill(order.plan.n_ranks)
    by.run.fixed(by.read(order.table), by.read(prices.table), clock, order.make_wires(by), ran)
    return Timed(*ran, range(n))


def ends_under(order: Compiled, prices: Prices, busy: Array) -> Array:
    """When `order` ends under many costs: for each a row of `busy`, nanoseconds by group, the rest as in `prices`."""
    n, k = len(order.instructions), len(busy)
    by = KERNEL.select(n * k)
    if prices.crowded:
        return np.array([run(order, case).makespan for case in prices.with_times(busy)], np.int64)
    last = np.zeros(k, np.int64)
    if by.takes_arrays:
        cases = prices.table.arrays._replace(busy=np.ascontiguousarray(busy), quick=prices.peak_rate_times(busy))
        ran = Ran(by.fill(n), by.fill(n))
        by.run.every(order.table.arrays, cases, by.fill(order.plan.n_ranks), order.make_wires(by), ran, last)
        return last

    def rows(size: int) -> Array:
        return np.zeros((size, k), np.int64)

    links = len(order.pairs)
    wires = Wires(rows(links), rows(links) + LONG_AGO, [0] * links, rows(order.message_offsets[-1]))
    ran, clock = Ran(rows(n), rows(n)), rows(order.plan.n_ranks)
    cases = prices.table.lists._replace(busy=busy.T, quick=prices.peak_rate_times(busy).T)
    at_once = rebind_globals(kernel.fixed, max=np.maximum, leave=rebind_globals(kernel.leave, max=np.maximum))
    at_once(order.table.lists, cases, clock, wires, ran)
    ran.ends.max(axis=0, initial=0, out=last)
    return last
