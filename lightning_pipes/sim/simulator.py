"""What a program or a policy would do, in virtual time."""

from __future__ import annotations

from itertools import repeat
from operator import itemgetter

from lightning_pipes.cost import Costs
from lightning_pipes.ir import Plan, Policy, Program
from lightning_pipes.sim.dispatch import Dispatch
from lightning_pipes.sim.memory import Limit, peaks
from lightning_pipes.sim.static import compiled, run
from lightning_pipes.sim.timeline import Event, Timeline


def simulate(
    order: Program | Policy,
    plan: Plan,
    costs: Costs,
    *,
    batches: int | None = None,
    memory_limit: Limit = None,
    blocking_sends: bool = False,
) -> Timeline:
    """When everything runs if `costs` are true: integer nanoseconds, the same on every machine.

    A rank computes one thing at a time. A link moves one message at a time in each direction, in the order in which
    they were sent; latency does not occupy it. Sends and computations overlap unless `blocking_sends`: then a rank
    computes on when the last byte has left. Receives take no time of their own.

    Args:
        order: a program, run in exactly its order and lowered first if it has no transfers yet; or a policy, asked in
            virtual time.
        batches: batches per job; by default the plan's own for a policy, three more than the head begins for an
            endless program. A finite program has its own number.
        memory_limit: bytes of every rank, or of each. What would not fit waits.
        blocking_sends: whether a rank waits for its sends.

    Raises:
        DeadlockError: ranks wait for each other, for memory, or for a policy that picks nothing; names who and what.
        PlanError: the costs do not know some stage, or the weights alone exceed the limit.
        TypeError: neither a program nor a policy.
    """
    if not isinstance(order, (Program, Policy)):
        raise TypeError(f"simulate takes a Program or a Policy, got {order!r}; a schedule's is schedule.program(plan)")
    if not isinstance(order, Program):
        dispatch = Dispatch(order, plan, costs, batches or plan.batches, memory_limit, blocking_sends)
        events = dispatch.run()
        peak = tuple(pool.peak for pool in dispatch.pools)
        return Timeline(tuple(sorted(events, key=itemgetter(2, 3, 0))), plan, peak, order.name)
    program = order.unroll(order.head_batches + 3 if batches is None else batches) if order.endless else order
    ready = compiled(program, plan)
    starts, ends = run(ready, plan, costs, blocking_sends)
    peak = peaks(ready, plan, costs, memory_limit)
    rows = sorted(zip(starts, ends, ready.ranks, range(len(starts)), ready.instructions, strict=True))
    made = map(tuple.__new__, repeat(Event), [(rank, i, start, end) for start, end, rank, _, i in rows])
    return Timeline(tuple(made), plan, peak)


def makespan(program: Program, plan: Plan, costs: Costs, *, blocking_sends: bool = False) -> int:
    """Nanoseconds that the finite `program` takes: `simulate(...).makespan` without its timeline, for searches.

    Raises:
        DeadlockError: ranks wait for each other.
        PlanError: the costs do not know some stage.
    """
    return max(run(compiled(program, plan), plan, costs, blocking_sends)[1], default=0)
