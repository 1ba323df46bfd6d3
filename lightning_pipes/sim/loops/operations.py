"""The operations of a window as numbers: computations and messages, with their ranks, links, durations and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, Self, TypeVar

import numpy as np

from lightning_pipes.cost import CostModel, Costs, Regime
from lightning_pipes.cost.links import regime_of
from lightning_pipes.cost.model import PerInstructionCosts
from lightning_pipes.ir import (
    COMPUTE_KINDS,
    SEND_KINDS,
    CostKey,
    DeadlockError,
    Instruction,
    Kind,
    Plan,
    PlanError,
    cost_key,
)
from lightning_pipes.sim.loops.jit import Kernel
from lightning_pipes.sim.loops.kernel import EARLIEST_TIME, UNLIMITED
from lightning_pipes.sim.loops.tables import Array, Graph, Needed, PriceList, Table, Wires


@dataclass(frozen=True, eq=False)
class Operations:
    """The computations and sends of a window.

    Receives are not operations: a computation waits directly for the sends whose messages it receives.

    Attributes:
        plan: the plan.
        instructions: the instruction of each operation.
        like: one instruction for each group of operations with the same cost.
        pairs: (from rank, to rank) of every link.
        table: the rank, link and group of each operation, and the operations with which it is connected.
    """

    plan: Plan
    instructions: tuple[Instruction, ...]
    like: tuple[Instruction, ...]
    pairs: tuple[tuple[int, int], ...]
    table: Table[Graph]

    @cached_property
    def ranks(self) -> list[int]:
        """The rank of each operation. The rank of a message is its sender."""
        return self.table.lists.rank  # type: ignore[no-any-return]

    @cached_property
    def per_operation(self) -> Self:
        """The same operations, each in a group of its own."""
        alone = self.table.lists._replace(group=list(range(len(self.instructions))))
        return replace(self, like=self.instructions, table=Table(alone))

    @cached_property
    def groups(self) -> list[int]:
        """The group of each operation, as an index into `like`."""
        return self.table.lists.group  # type: ignore[no-any-return]

    @cached_property
    def message_offsets(self) -> list[int]:
        """The number of messages on all links before each link, followed by the total number."""
        counts = [0] * len(self.pairs)
        for link in self.table.lists.link:
            if link >= 0:
                counts[link] += 1
        return list(accumulate(counts, initial=0))

    def make_wires(self, by: Kernel) -> Wires:
        """Return the initial state of the wires and links, which the kernel may modify."""
        links = len(self.pairs)  # there are no more wires than links
        return Wires(by.fill(links), by.fill(links, EARLIEST_TIME), by.fill(links), by.fill(self.message_offsets[-1]))

    def price_operations(self, costs: Costs) -> Prices:
        """Return the durations of the operations.

        The result for the last costs is cached, so a costs object must not change between two calls.
        """
        known = self._known
        if not known or known[0][0] is not costs:
            known[:] = [(costs, _compute_prices(self, costs))]
        return known[0][1]

    @cached_property
    def _known(self) -> list[tuple[Costs, Prices]]:
        return []


@dataclass(frozen=True, eq=False)
class Prices:
    """The durations of operations in nanoseconds.

    Attributes:
        table: the part that the kernel reads.
        peak_ratios: for each group, the time of a message at full speed as a share of its time at the rate of the link.
        crowded: whether messages of several ranks share a wire, so that their order is not known in advance.
        regimes: the regimes of the links on which messages take time.
    """

    table: Table[PriceList]
    peak_ratios: tuple[float, ...]
    crowded: bool
    regimes: tuple[Regime, ...]

    @property
    def busy(self) -> list[int]:
        """The duration of each group."""
        return self.table.lists.busy  # type: ignore[no-any-return]

    def peak_rate_times(self, busy: Array) -> Array:
        """Return the durations of messages at full speed.

        Args:
            busy: the durations of the groups. Several cases are several rows.
        """
        return np.asarray(np.rint(busy * np.array(self.peak_ratios)).astype(np.int64))

    def with_times(self, busy: Array) -> Iterator[Prices]:
        """Yield the same prices with other durations, for each row of `busy`."""
        for own, quick in zip(busy.tolist(), self.peak_rate_times(busy).tolist(), strict=True):
            yield replace(self, table=Table(self.table.lists._replace(busy=own, quick=quick)))


@dataclass(frozen=True)
class OperationLog:
    """The start and end of each operation.

    Attributes:
        starts: nanoseconds, as a list or an array.
        ends: nanoseconds, as a list or an array.
        turn: the order in which operations of a rank ran that have the same start and end.
    """

    starts: Any
    ends: Any
    turn: Any

    @property
    def makespan(self) -> int:
        """The end of the last operation in nanoseconds."""
        return int(max(self.ends, default=0) if isinstance(self.ends, list) else self.ends.max(initial=0))

    @property
    def to_lists(self) -> tuple[list[int], list[int], list[int]]:
        """The starts, ends and turns as lists."""
        starts, ends, turn = (np.asarray(column).tolist() for column in (self.starts, self.ends, self.turn))
        return starts, ends, turn


class OperationNumbers:
    """Assigns groups and links to operations while they are collected."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._groups: dict[tuple[Kind, int, int, int, CostKey, int], int] = {}
        self._links: dict[tuple[int, int], int] = {}
        self.like: list[Instruction] = []

    def assign_numbers(self, i: Instruction, rank: int) -> tuple[int, int]:
        """Return the link of `i`, which is -1 for a computation, and its group."""
        kind, stage, job, batch, (start, stop) = i
        link = -1
        same: CostKey = stop - start
        if kind in SEND_KINDS:
            pair = (rank, self._plan.target_rank(i))
            link = self._links.setdefault(pair, len(self._links))
        else:
            same = cost_key(i, self._plan)
        group = self._groups.setdefault((kind, stage, job, batch, same, link), len(self.like))
        if group == len(self.like):
            self.like.append(i)
        return link, group

    @property
    def link_pairs(self) -> tuple[tuple[int, int], ...]:
        """(from rank, to rank) of every link."""
        return tuple(self._links)


def flatten_lists(lists: Iterable[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Return the start of each list in the concatenation of all lists, then its length, and the concatenation."""
    first: list[int] = [0]
    row: list[int] = []
    for numbers in lists:
        row += numbers
        first.append(len(row))
    return first, row


_Some = TypeVar("_Some", bound=Operations)


def priced_by(costs: Costs, operations: _Some) -> tuple[_Some, Prices]:
    """Return the operations and their durations.

    Operations of the same size form one group, unless `costs` contains a time for each instruction.
    """
    if (
        isinstance(costs, CostModel | PerInstructionCosts) and costs.per_instruction
    ):  # the class comes first, because an isinstance check takes 7 us for a protocol
        operations = operations.per_operation
    return operations, operations.price_operations(costs)


def _compute_prices(operations: Operations, costs: Costs) -> Prices:
    plan, pairs = operations.plan, operations.pairs
    if isinstance(costs, CostModel):
        costs.check(plan)
    busy: list[int] = []
    late: list[int] = []
    hurry: list[float] = []
    slowest = dict.fromkeys(pairs, 0)  # the largest latency of each link
    timed = set()  # links on which messages take time
    for i in operations.like:
        takes, latency, share = 0, 0, 0.0
        if i.kind in SEND_KINDS:
            pair = (plan.rank_of(i), plan.target_rank(i))
            takes, latency = costs.transfer_ns(i, plan)
            share = costs.link_between(*pair).peak_ratio
            slowest[pair] = max(slowest[pair], latency)
            if takes or latency:
                timed.add(pair)
        else:
            takes = costs.duration_ns(i, plan)
        busy.append(takes)
        late.append(latency)
        hurry.append(share)
    if len(operations.groups) * (max(busy, default=0) + max(late, default=0) + costs.overhead_ns) >= UNLIMITED:
        longest = max([*busy, *late]) / 1e9
        raise PlanError(
            f"{len(operations.groups)} operations of up to {longest:g} s each are more than can be simulated"
        )
    quick = [round(takes * share) for takes, share in zip(busy, hurry, strict=True)]
    links = [costs.link_between(*pair) for pair in pairs]
    depth = [round(link.burst_seconds * 1e9) for link in links]
    posted = [link.max_in_flight if slowest[pair] else 0 for link, pair in zip(links, pairs, strict=True)]
    named: dict[str, int] = {}  # the first link with each wire name
    wire = [named.setdefault(link.wire, x) if link.wire else x for x, link in enumerate(links)]
    crowded = any(pairs[w][0] != source for w, (source, _) in zip(wire, pairs, strict=True))
    blocks = [int(link.blocking) for link in links]
    slow = [(link, costs.link_between(*pair[::-1])) for link, pair in zip(links, pairs, strict=True) if pair in timed]
    regimes = {regime_of(there, back) for there, back in slow}
    table = Table(
        PriceList(costs.overhead_ns, busy, quick, late, depth, posted, wire, blocks, operations.message_offsets[:-1])
    )
    return Prices(table, tuple(hurry), crowded, tuple(each for each in Regime if each in regimes))


Limit = int | Sequence[int] | None


def limits_of(limit: Limit, ranks: int) -> list[int]:
    """Return the bytes that each of `ranks` ranks may hold."""
    every = UNLIMITED if limit is None else limit
    return [every] * ranks if isinstance(every, int) else list(every)


@dataclass(frozen=True, eq=False)
class Bytes:
    """The memory of the ranks.

    Attributes:
        held: the bytes that each rank holds before any operation runs.
        may: the bytes that each rank may hold.
        taken, freed: for each group, the bytes that an operation allocates when it starts and frees when it ends.
    """

    held: list[int]
    may: list[int]
    taken: list[int]
    freed: list[int]

    @cached_property
    def table(self) -> Table[Needed]:
        """The part that the kernel reads."""
        return Table(Needed(self.taken, self.freed, self.may))

    @classmethod
    def from_costs(cls, operations: Operations, plan: Plan, costs: Costs, limit: Limit) -> Bytes:
        """Return the memory of `operations` according to `costs`.

        Raises:
            PlanError: the weights alone exceed the limit.
        """
        held = [costs.resident_bytes(rank, plan) for rank in range(plan.n_ranks)]
        may = limits_of(limit, len(held))
        for rank, (needed, there) in enumerate(zip(held, may, strict=True)):
            if needed > there:
                raise PlanError(f"rank {rank} has {there} bytes and needs {needed} for weights alone; use more ranks")
        both = [costs.memory_change(i, plan) if i.kind in COMPUTE_KINDS else (0, 0) for i in operations.like]
        return cls(held, may, [taken for taken, _ in both], [freed for _, freed in both])

    @classmethod
    @lru_cache(maxsize=16)
    def create_untracked(cls, operations: Operations) -> Bytes:
        """Return the memory of operations for simulations that do not track memory."""
        ranks, groups = operations.plan.n_ranks, len(operations.like)
        return cls([0] * ranks, [UNLIMITED] * ranks, [0] * groups, [0] * groups)

    def why_not(self, rank: int, i: Instruction, taken: int, held: int) -> str:
        """Return the reason why `i` does not fit, for an error message."""
        return f"rank {rank} waits at {i} for {taken} bytes: it holds {held} and may hold {self.may[rank]}"


def rank_peaks(order: Operations, plan: Plan, costs: Costs, limit: Limit) -> tuple[int, ...]:
    """Return the largest number of bytes that each rank holds.

    The peak of a rank depends only on its own order, not on the other ranks.

    Raises:
        DeadlockError: an instruction needs memory that only a later instruction of its rank frees.
        PlanError: the weights alone exceed the limit.
    """
    memory = Bytes.from_costs(order, plan, costs, limit)
    held, peak = memory.held.copy(), memory.held.copy()
    if any(memory.taken):
        for rank, group, i in zip(order.ranks, order.groups, order.instructions, strict=True):
            taken = memory.taken[group]
            now = held[rank] + taken
            if taken > 0 and now > memory.may[rank]:
                raise DeadlockError(
                    f"{memory.why_not(rank, i, taken, held[rank])}; the operation that it waits for comes later in "
                    "its own order. Start fewer forwards before the first backward, use more micro-batches, or "
                    "recompute"
                )
            if now > peak[rank]:
                peak[rank] = now
            held[rank] = now - memory.freed[group]
    return tuple(peak)
