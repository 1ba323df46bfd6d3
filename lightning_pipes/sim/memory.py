"""Bytes that ranks hold while they run."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipes.cost import Costs
from lightning_pipes.ir import COMPUTE, DeadlockError, Instruction, Plan, PlanError
from lightning_pipes.sim.static import Compiled

Limit = int | Sequence[int] | None


class Pool:
    """What one rank holds: its weights all the time, activations from their forward to the end of their backward."""

    def __init__(self, rank: int, plan: Plan, costs: Costs, limit: Limit) -> None:
        self.rank, self.plan, self.costs = rank, plan, costs
        self.limit = limit if limit is None or isinstance(limit, int) else limit[rank]
        self.used = self.peak = costs.resident(rank, plan)
        if self.limit is not None and self.used > self.limit:
            raise PlanError(
                f"rank {rank} has {self.limit} bytes and needs {self.used} for weights alone; use more ranks"
            )

    def fits(self, i: Instruction) -> bool:
        """Whether there is room to start `i`."""
        if self.limit is None:
            return True
        taken, _ = self.costs.held(i, self.plan)
        return taken <= 0 or self.used + taken <= self.limit

    def start(self, i: Instruction) -> None:
        """Take what `i` needs."""
        self.used += self.costs.held(i, self.plan)[0]
        self.peak = max(self.peak, self.used)

    def end(self, i: Instruction) -> None:
        """Give back what `i` frees."""
        self.used -= self.costs.held(i, self.plan)[1]

    def why_not(self, i: Instruction) -> str:
        """Why `i` does not fit, for an error."""
        taken, _ = self.costs.held(i, self.plan)
        return f"rank {self.rank} waits at {i} for {taken} bytes: it holds {self.used} and may hold {self.limit}"


def peaks(program: Compiled, plan: Plan, costs: Costs, limit: Limit) -> tuple[int, ...]:
    """Most bytes that each rank holds, which its own order decides, whatever the others do.

    Raises:
        DeadlockError: an instruction needs room that only a later one of its rank gives back.
        PlanError: the weights alone do not fit.
    """
    pools = [Pool(rank, plan, costs, limit) for rank in range(plan.n_ranks)]
    held = [costs.held(i, plan) if i.kind in COMPUTE else (0, 0) for i in program.like]
    if any(taken for taken, _ in held):
        for (rank, _, group, _), i in zip(program.steps, program.instructions, strict=True):
            taken, freed = held[group]
            pool = pools[rank]
            if taken > 0 and not pool.fits(i):
                raise DeadlockError(
                    f"{pool.why_not(i)}; what it waits for comes later in its own order. "
                    "Start fewer forwards before the first backward, use more micro-batches, or recompute"
                )
            pool.used += taken
            if pool.used > pool.peak:
                pool.peak = pool.used
            pool.used -= freed
    return tuple(pool.peak for pool in pools)
