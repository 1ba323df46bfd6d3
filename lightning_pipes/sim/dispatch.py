"""A policy in virtual time: every rank asks it what to do whenever it is free and something is ready."""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from lightning_pipes.cost import Costs
from lightning_pipes.ir import (
    COMPUTE,
    RECEIVES,
    SENDS,
    DeadlockError,
    DependencyTracker,
    Instruction,
    Kind,
    Plan,
    Policy,
    ProgramError,
    RankView,
    ready_key,
    window,
)
from lightning_pipes.sim.memory import Limit, Pool
from lightning_pipes.sim.timeline import Event


class Dispatch:
    """One run of `policy` over `batches` batches of every job.

    Transfers are not asked about: a send starts when its message is complete, a receive ends when it has arrived. All
    that happens at one instant has happened before any rank asks; ranks ask in order.
    """

    def __init__(
        self, policy: Policy, plan: Plan, costs: Costs, batches: int, memory_limit: Limit, blocking_sends: bool
    ) -> None:
        self.policy, self.plan, self.costs, self.blocking_sends = policy, plan, costs, blocking_sends
        self.tracker = DependencyTracker(plan)
        self.events: list[Event] = []
        self.pools = [Pool(rank, plan, costs, memory_limit) for rank in range(plan.n_ranks)]
        self._ready: list[list[tuple[tuple[object, ...], Instruction]]] = [[] for _ in range(plan.n_ranks)]
        self._busy = [False] * plan.n_ranks
        self._last: list[Instruction | None] = [None] * plan.n_ranks
        self._in_flight = [dict.fromkeys(stages, 0) for stages in plan.stages]
        self._link_free: dict[tuple[int, int], int] = defaultdict(int)
        self._sending = [0] * plan.n_ranks  # until when a blocking send holds the rank
        self._agenda: list[
            tuple[int, int, int, Instruction | None]
        ] = []  # time, number, rank, what ends (None: a send)
        self._count = 0
        for rank in range(plan.n_ranks):
            for job in range(len(plan.jobs)):
                for batch in range(batches):
                    self._admit(0, self.tracker.add(window(plan, rank, job, batch)))

    def run(self) -> tuple[Event, ...]:
        """Everything that ran.

        Raises:
            DeadlockError: something is left, and nothing is on its way.
            ProgramError: the policy picked what is not ready.
        """
        ranks = range(self.plan.n_ranks)
        asking: Iterable[int] = ranks
        now = 0
        while True:
            for rank in asking:
                if self._ready[rank] and not self._busy[rank]:
                    self._ask(rank, now)
            if not self._agenda:
                break
            now = self._agenda[0][0]
            while self._agenda and self._agenda[0][0] == now:
                _, _, rank, ended = heappop(self._agenda)
                self._finish(now, rank, ended)
            asking = ranks
        if self.tracker.waiting or any(self._ready):
            raise DeadlockError(self._stuck())
        return tuple(self.events)

    def _ask(self, rank: int, now: int) -> None:
        ready = tuple(i for _, i in self._ready[rank] if self.pools[rank].fits(i))
        if not ready:
            return
        view = RankView(rank, self._last[rank], dict(self._in_flight[rank]))
        i = self.policy.pick(ready, view, self.plan)
        if i is None:
            return
        if i not in ready:
            raise ProgramError(f"{self.policy.name} picked {i} on rank {rank}, which is not among {_some(ready)}")
        self._ready[rank].remove((ready_key(i), i))
        self._busy[rank] = True
        self._last[rank] = i
        self.pools[rank].start(i)
        if i.kind is Kind.F:
            self._in_flight[rank][i.stage] += i.span.rows
        start = now + self.costs.overhead_ns
        end = start + self.costs.duration(i, self.plan)
        self.events.append(Event(rank, i, start, end))
        self._at(end, rank, i)

    def _finish(self, now: int, rank: int, ended: Instruction | None) -> None:
        if ended is None:
            self._busy[rank] = False
            return
        self._admit(now, self.tracker.complete(ended))
        if ended.kind not in COMPUTE:
            return
        self.pools[rank].end(ended)
        if ended.kind is Kind.B or ended.kind is Kind.W:
            self._in_flight[rank][ended.stage] -= ended.span.rows
        if self._sending[rank] > now:
            self._at(self._sending[rank], rank, None)
        else:
            self._busy[rank] = False

    def _admit(self, now: int, ready: list[Instruction]) -> None:
        """Computations wait to be picked, sends start, receives have ended."""
        for i in sorted(ready):
            rank = self.plan.ranks[i.stage]
            if i.kind in COMPUTE:
                insort(self._ready[rank], (ready_key(i), i))
            elif i.kind in SENDS:
                self._send(now, rank, i)
            elif i.kind in RECEIVES:
                self._admit(now, self.tracker.complete(i))

    def _send(self, now: int, rank: int, i: Instruction) -> None:
        link = (rank, self.plan.ranks[i.stage + 1 if i.kind is Kind.SF else i.stage - 1])
        busy, latency = self.costs.transfer(i, self.plan)
        start = max(now, self._link_free[link])
        self._link_free[link] = start + busy
        if self.blocking_sends:
            self._sending[rank] = max(self._sending[rank], start + busy)
        self.events.append(Event(rank, i, start, start + busy + latency))
        self._at(start + busy + latency, rank, i)

    def _at(self, time: int, rank: int, ends: Instruction | None) -> None:
        self._count += 1
        heappush(self._agenda, (time, self._count, rank, ends))

    def _stuck(self) -> str:
        lines = []
        for rank, ready in enumerate(self._ready):
            fitting = [i for _, i in ready if self.pools[rank].fits(i)]
            if fitting:
                lines.append(f"rank {rank} may run {_some(fitting)}, and {self.policy.name} picks none")
            elif ready:
                lines.append(self.pools[rank].why_not(ready[0][1]))
        for rank in range(self.plan.n_ranks):
            if not self._ready[rank]:
                first = next((i for i in self.tracker.waiting if self.plan.ranks[i.stage] == rank), None)
                if first is not None:
                    lines.append(f"rank {rank} waits at {first} for {_some(self.tracker.missing(first))}")
        return "nothing is on its way: " + "; ".join(lines)


def _some(instructions: Sequence[Instruction]) -> str:
    return ", ".join(str(i) for i in instructions[:4]) + (", ..." if len(instructions) > 4 else "")
