"""Run a policy in virtual time: it picks an instruction whenever a rank is free and has ready instructions.

The policy does not pick transfers. A send starts when its message is complete, and a receive ends when the message has
arrived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

from lightning_pipes.ir import (
    COMPUTE_KINDS,
    RECEIVE_KINDS,
    DeadlockError,
    Instruction,
    Kind,
    LayerUse,
    Ledger,
    Policy,
    ProgramError,
    RankView,
    RulePolicy,
    draw_grid,
    eligible_instructions,
    needs,
)
from lightning_pipes.sim.loops.kernel import UNLIMITED
from lightning_pipes.sim.loops.operations import Bytes, Prices
from lightning_pipes.sim.loops.queues import DispatchRun, Queues, run_queues


def run_policy(
    policy: Policy, queues: Queues, prices: Prices, memory: Bytes, uses: Sequence[LayerUse] = ()
) -> DispatchRun:
    """Return the result of running `queues` in the order that `policy` chooses.

    Instructions that would exceed the limits of the plan or the memory are not offered to the policy. If the policy is
    a `RulePolicy`, the kernel applies its rule and the policy itself is not called.

    Args:
        policy: the policy.
        queues: the operations, as returned by `sim.loops.queues.open_queues`.
        prices: the durations of the operations.
        memory: the bytes of the operations and ranks.
        uses: the layers that each batch of an endless window uses, which the policy can see.

    Raises:
        DeadlockError: some operations have not run, and no operation is in progress.
        ProgramError: the policy picked an instruction that is not ready.
    """
    plan = queues.plan
    if isinstance(policy, RulePolicy):
        rule = policy.rule(plan)
        room = _list_room(queues, plan.limits, rule.limits)
        run = run_queues(queues, prices, memory, room=room, rule=rule)
    else:
        room = _list_room(queues, plan.limits)
        picker = partial(_Asking, policy, queues, memory, room, uses)
        run = run_queues(queues, prices, memory, room=room, picker=picker)
    if run.left:
        raise DeadlockError(_explain_deadlock(policy, queues, run, memory))
    return run


def _list_room(queues: Queues, *limits: Sequence[int]) -> list[int]:
    """Return the number of samples that each queue of forwards may hold at the same time."""
    room = [UNLIMITED] * len(queues.members)
    for stage, q in queues.forwards.items():
        room[q] = min([UNLIMITED, *(most[stage] for most in limits if most)])
    return room


class _Asking:
    """Picks operations with a policy instead of the kernel's rule."""

    def __init__(
        self,
        policy: Policy,
        queues: Queues,
        memory: Bytes,
        room: Sequence[int],
        uses: Sequence[LayerUse],
        run: DispatchRun,
    ) -> None:
        self._policy, self._queues, self._memory, self._room, self._run = policy, queues, memory, room, run
        self._last: list[Instruction | None] = [None] * queues.plan.n_ranks
        self._seen = [_Seen(queues, rank, uses, policy.depth) for rank in range(queues.plan.n_ranks)]

    def __call__(self, rank: int, forward: int, other: int, nothing: int, alternate: bool, after_forward: bool) -> int:
        run, instructions, last = self._run, self._queues.instructions, self._last[rank]
        if last is not None:  # the rank is free, so its last instruction has ended
            self._seen[rank].end(last)
        number = {instructions[i]: i for i in sorted(self._ready_instructions(rank))}
        choice = eligible_instructions(number, lambda i: self._has_room(rank, number[i]))
        if not choice:
            return nothing
        plan, forwards = self._queues.plan, self._queues.forwards
        in_flight = {
            stage: self._room[forwards[stage]] - run.ready.room[forwards[stage]] for stage in plan.stages[rank]
        }
        ledger = self._seen[rank].ledger
        view = RankView(rank, self._last[rank], in_flight, ledger.uses, ledger.versions)
        picked = self._policy.pick(choice, view, plan)
        if picked is None:
            return nothing
        if picked not in choice:
            name = self._policy.name
            raise ProgramError(f"{name} picked {picked} on rank {rank}, which is not among {_format_some(choice)}")
        self._last[rank] = picked
        return number[picked]

    def _ready_instructions(self, rank: int) -> Iterator[int]:
        ready = self._run.ready
        queues, members = self._queues.queue_table.lists.queues, self._queues.queue_table.lists.members
        for q in range(queues[rank], queues[rank + 1]):
            rest = (members[k] for k in range(ready.low[q], len(members)))
            yield from islice((i for i in rest if ready.waiting[i] == 0), ready.count[q])

    def _has_room(self, rank: int, i: int) -> bool:
        taken = self._memory.taken[self._queues.groups[i]]
        room = self._run.ready.room[self._queues.pool[i]]
        return self._queues.rows[i] <= room and (
            taken <= 0 or self._run.held.now[rank] + taken <= self._memory.may[rank]
        )


class _Seen:
    """The endless window as the policy of a rank sees it: the batches in flight, and the versions of the layers."""

    def __init__(self, queues: Queues, rank: int, uses: Sequence[LayerUse], depth: int) -> None:
        plan = queues.plan
        self.ledger = Ledger(plan, plan.stages[rank])
        self._uses, self._depth = uses, depth
        mine = (
            i for i, r in zip(queues.instructions, queues.ranks, strict=True) if r == rank and i.kind in COMPUTE_KINDS
        )
        self._left = Counter(i.batch for i in mine) if uses else Counter()
        self._ended: Instruction | None = None
        self._newest = -1
        self._enter()

    def end(self, i: Instruction) -> None:
        """Record that the rank has run `i`. A repeated call with the same instruction has no effect."""
        if not self._uses or i == self._ended:
            return
        self._ended = i
        if i.kind is Kind.STEP:
            self.ledger.mark_done(i)
        self._left[i.batch] -= 1
        if not self._left[i.batch]:
            self.ledger.remove_batch(i.batch)
            self._enter()

    def _enter(self) -> None:
        oldest = min(self.ledger.uses, default=self._newest + 1)
        for batch in range(self._newest + 1, min(oldest + self._depth, len(self._uses))):
            self.ledger.enter(batch, self._uses[batch])
            self._newest = batch


def _explain_deadlock(policy: Policy, queues: Queues, run: DispatchRun, memory: Bytes) -> str:
    """Return the reason why no operation can run, with one entry for every rank that has not finished."""
    plan, lines = queues.plan, []
    over = {i for i, left in zip(queues.instructions, run.ready.waiting, strict=True) if left < 0}  # nothing is running

    def is_over(n: Instruction) -> bool:
        return all(map(is_over, needs(n, plan))) if n.kind in RECEIVE_KINDS else n in over

    for rank in range(plan.n_ranks):
        numbers = [i for i, r in enumerate(queues.ranks) if r == rank and queues.instructions[i].kind in COMPUTE_KINDS]
        ready = [i for i in numbers if run.ready.waiting[i] == 0]
        if not ready:
            first = next((i for i in numbers if run.ready.waiting[i] > 0), None)
            if first is not None:
                i = queues.instructions[first]
                missing = [n for n in needs(i, plan) if not is_over(n)]
                lines.append(f"rank {rank} waits at {i} for {_format_some(missing)}")
            continue
        free, held, may = run.ready.room, run.held.now[rank], memory.may[rank]
        taken = [memory.taken[queues.groups[i]] for i in ready]
        fitting = [i for i, more in zip(ready, taken, strict=True) if more <= 0 or held + more <= may]
        may_run = [queues.instructions[i] for i in fitting if queues.rows[i] <= free[queues.pool[i]]]
        if may_run:
            lines.append(f"rank {rank} may run {_format_some(may_run)}, but {policy.name} picks nothing")
        elif fitting:
            i = queues.instructions[fitting[0]]
            more = free[queues.pool[fitting[0]]]
            lines.append(f"rank {rank} waits at {i}: stage {i.stage} has room for {more} more samples")
        else:
            lines.append(memory.why_not(rank, queues.instructions[ready[0]], taken[0], held))
    ran = sorted((n for n, left in enumerate(run.ready.waiting) if left < 0), key=run.timed.turn.__getitem__)
    drawn = draw_grid([queues.instructions[n] for n in ran], plan)
    return f"no operation is in flight: {'; '.join(lines)}; operations so far:\n{drawn}"


def _format_some(instructions: Sequence[Instruction]) -> str:
    return ", ".join(str(i) for i in instructions[:4]) + (", ..." if len(instructions) > 4 else "")
