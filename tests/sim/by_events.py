"""A slow and simple simulator of policies with events and objects, for comparison with the kernel."""

from __future__ import annotations

from bisect import insort
from heapq import heappop, heappush

from lightning_pipes.ir import (
    COMPUTE_KINDS,
    RECEIVE_KINDS,
    SEND_KINDS,
    DependencyTracker,
    Kind,
    RankView,
    batch_instructions,
    eligible_instructions,
    ready_key,
)
from lightning_pipes.sim.timeline import Event
from tests.sim.links import Links


class StuckError(Exception):
    """Raised if work is left but no event is scheduled."""


class ByEvents:
    """A single run of `policy` over a number of batches of every job."""

    def __init__(self, policy, plan, costs, batches=1, memory=None, blocking_sends=False):
        self.policy, self.plan, self.costs, self.blocking_sends = policy, plan, costs, blocking_sends
        self.tracker = DependencyTracker(plan)
        self.links = Links(plan, costs)
        self.events = []
        self.memory = memory
        self.held = [costs.resident_bytes(rank, plan) for rank in range(plan.n_ranks)]
        self.peak = list(self.held)
        self._ready = [[] for _ in range(plan.n_ranks)]
        self._busy = [False] * plan.n_ranks
        self._last = [None] * plan.n_ranks
        self._in_flight = [dict.fromkeys(stages, 0) for stages in plan.stages]
        self._sending = [0] * plan.n_ranks  # the time until which a blocking send occupies the rank
        self._agenda = []  # time, number, rank, and the computation that ends, or None for a send
        self._count = 0
        for rank in range(plan.n_ranks):
            for job in range(len(plan.jobs)):
                for batch in range(batches):
                    self._admit(0, self.tracker.add(batch_instructions(plan, rank, job, batch)))

    def run(self):
        """Return the events of the run."""
        now = 0
        while True:
            for rank in range(self.plan.n_ranks):
                if self._ready[rank] and not self._busy[rank]:
                    self._ask(rank, now)
            if not self._agenda:
                break
            now = self._agenda[0][0]
            while self._agenda and self._agenda[0][0] == now:
                _, _, rank, ended = heappop(self._agenda)
                self._finish(now, rank, ended)
        if self.tracker._waiting or any(self._ready):
            raise StuckError
        return self.events

    def _ask(self, rank, now):
        ready = eligible_instructions([i for _, i in self._ready[rank]], lambda i: self._fits(rank, i))
        if not ready:
            return
        view = RankView(rank, self._last[rank], dict(self._in_flight[rank]))
        i = self.policy.pick(ready, view, self.plan)
        if i is None:
            return
        assert i in ready
        self._ready[rank].remove((ready_key(i), i))
        self._busy[rank] = True
        self._last[rank] = i
        self.held[rank] += self.costs.memory_change(i, self.plan)[0]
        self.peak[rank] = max(self.peak[rank], self.held[rank])
        if i.kind is Kind.F:
            self._in_flight[rank][i.stage] += i.span.rows
        start = now + self.costs.overhead_ns
        end = start + self.costs.duration_ns(i, self.plan)
        self.events.append(Event(rank, i, start, end))
        self._at(end, rank, i)

    def _fits(self, rank, i):
        taken = self.costs.memory_change(i, self.plan)[0]
        if self.memory is not None and taken > 0 and self.held[rank] + taken > self.memory:
            return False
        limits = self.plan.limits
        return i.kind is not Kind.F or not limits or self._in_flight[rank][i.stage] + i.span.rows <= limits[i.stage]

    def _finish(self, now, rank, ended):
        if ended is None:
            self._busy[rank] = False
            return
        self._admit(now, self.tracker.complete(ended))
        if ended.kind not in COMPUTE_KINDS:
            return
        self.held[rank] -= self.costs.memory_change(ended, self.plan)[1]
        if ended.kind is Kind.B or ended.kind is Kind.W:
            self._in_flight[rank][ended.stage] -= ended.span.rows
        if self._sending[rank] > now:
            self._at(self._sending[rank], rank, None)
        else:
            self._busy[rank] = False

    def _admit(self, now, ready):
        """Queue computations, start sends and complete receives."""
        for i in sorted(ready):
            rank = self.plan.ranks[i.stage]
            if i.kind in COMPUTE_KINDS:
                insort(self._ready[rank], (ready_key(i), i))
            elif i.kind in SEND_KINDS:
                self._send(now, rank, i)
            elif i.kind in RECEIVE_KINDS:
                self._admit(now, self.tracker.complete(i))

    def _send(self, now, rank, i):
        start, out, there = self.links.send(now, i)
        if self.blocking_sends:
            self._sending[rank] = max(self._sending[rank], out)
        self.events.append(Event(rank, i, start, there))
        self._at(there, rank, i)

    def _at(self, time, rank, ends):
        self._count += 1
        heappush(self._agenda, (time, self._count, rank, ends))
