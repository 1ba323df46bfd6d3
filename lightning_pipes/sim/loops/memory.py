"""Bytes that ranks hold while they run: weights all the time, activations from forward to the end of backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from lightning_pipes.cost import Costs
from lightning_pipes.ir import COMPUTE, DeadlockError, Instruction, Plan, PlanError
from lightning_pipes.sim.loops.kernel import PLENTY
from lightning_pipes.sim.loops.operations import Operations
from lightning_pipes.sim.loops.tables import Needed, Table

Limit = int | Sequence[int] | None


def limits_of(limit: Limit, ranks: int) -> list[int]:
    """The bytes that each of `ranks` ranks may hold."""
    every = PLENTY if limit is None else limit
    return [every] * ranks if isinstance(every, int) else list(every)


@dataclass(frozen=True, eq=False)
class Bytes:
    """The bytes that ranks hold.

    Attributes:
        held: of each rank, before anything runs.
        may: what each rank may hold.
        taken, freed: by group of operations, what one takes when it starts and gives back when it ends.
    """

    held: list[int]
    may: list[int]
    taken: list[int]
    freed: list[int]

    @cached_property
    def table(self) -> Table[Needed]:
        """The part of it that the kernel reads."""
        return Table(Needed(self.taken, self.freed, self.may))

    @classmethod
    def from_costs(cls, operations: Operations, plan: Plan, costs: Costs, limit: Limit) -> Bytes:
        """Return the memory of `operations` by `costs`.

        Raises:
            PlanError: the weights alone do not fit.
        """
        held = [costs.resident_bytes(rank, plan) for rank in range(plan.n_ranks)]
        may = limits_of(limit, len(held))
        for rank, (needed, there) in enumerate(zip(held, may, strict=True)):
            if needed > there:
                raise PlanError(f"rank {rank} has {there} bytes and needs {needed} for weights alone; use more ranks")
        both = [costs.memory_change(i, plan) if i.kind in COMPUTE else (0, 0) for i in operations.like]
        return cls(held, may, [taken for taken, _ in both], [freed for _, freed in both])

    @classmethod
    @lru_cache(maxsize=16)
    def untracked(cls, operations: Operations) -> Bytes:
        """Return the bytes of operations without tracked memory."""
        ranks, groups = operations.plan.n_ranks, len(operations.like)
        return cls([0] * ranks, [PLENTY] * ranks, [0] * groups, [0] * groups)

    def why_not(self, rank: int, i: Instruction, taken: int, held: int) -> str:
        """Why `i` does not fit, for an error."""
        return f"rank {rank} waits at {i} for {taken} bytes: it holds {held} and may hold {self.may[rank]}"


def rank_peaks(order: Operations, plan: Plan, costs: Costs, limit: Limit) -> tuple[int, ...]:
    """Most bytes that each rank holds, which its own `order` decides, whatever the others do.

    Raises:
        DeadlockError: an instruction needs room that only a later one of its rank gives back.
        PlanError: the weights alone do not fit.
    """
    memory = Bytes.from_costs(order, plan, costs, limit)
    held, peak = memory.held.copy(), memory.held.copy()
    if any(memory.taken):
        for rank, group, i in zip(order.ranks, order.groups, order.instructions, strict=True):
            taken = memory.taken[group]
            now = held[rank] + taken
            if taken > 0 and now > memory.may[rank]:
                raise DeadlockError(
                    f"{memory.why_not(rank, i, taken, held[rank])}; what it waits for comes later in its own order. "
                    "Start fewer forwards before the first backward, use more micro-batches, or recompute"
                )
            if now > peak[rank]:
                peak[rank] = now
            held[rank] = now - memory.freed[group]
    return tuple(peak)
