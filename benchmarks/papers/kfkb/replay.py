"""Replays of traces: event by event simulations of links whose speed changes while they transmit messages.

The links of the package's simulator have a constant speed, so this is a separate simulator. Both agree on links with a
constant speed.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from lightning_pipes.ir import Instruction, Kind, Plan, Program, Rule, Span

Direction = tuple[int, int]
Recorded = tuple[int, Instruction, int, int]
"""(rank, instruction, start, end) with times in nanoseconds. A transfer has the rank that receives the message."""


@dataclass(frozen=True)
class Trace:
    """The changes of one direction of a link.

    Attributes:
        since: the start of each period, in nanoseconds and in ascending order.
        takes: nanoseconds of a message on the link in each period.
    """

    since: tuple[int, ...]
    takes: tuple[int, ...]

    @classmethod
    def steady(cls, takes: int) -> Trace:
        """Return a trace without changes."""
        return cls((0,), (takes,))

    @classmethod
    def switching(cls, rng: random.Random, takes: Sequence[int], dwell: float, seconds: float) -> Trace:
        """Return a trace that switches between several times of a message at random.

        Args:
            rng: the source of random numbers.
            takes: the possible nanoseconds of a message.
            dwell: the mean seconds between two changes, which are distributed exponentially.
            seconds: the length of the trace.
        """
        since, found, at = list[int](), list[int](), 0.0
        while at < seconds:
            since.append(round(1e9 * at))
            found.append(rng.choice([t for t in takes if not found or t != found[-1]]))
            at += rng.expovariate(1 / dwell)
        return cls(tuple(since), tuple(found))

    def arrival(self, start: int) -> int:
        """Return the time at which a message arrives if its transfer begins at `start`."""
        n = max(0, bisect_right(self.since, start) - 1)
        at, left = float(start), 1.0
        while n + 1 < len(self.since):
            part = (self.since[n + 1] - at) / self.takes[n] if self.takes[n] else 1.0
            if part >= left:
                break
            at, left, n = float(self.since[n + 1]), left - part, n + 1
        return round(at + left * self.takes[n])


class Replay:
    """One step of a pipeline with one stage on each rank.

    Args:
        order: a program without transfers, or a rule.
        plan: the plan, with its stages and micro-batches.
        times: nanoseconds of a forward and of a backward, which are equal for all stages.
        links: the trace of each direction between neighbors.
        start: the time at which the step begins, on the time axis of the traces.
    """

    def __init__(
        self,
        order: Program | Rule,
        plan: Plan,
        times: Mapping[Kind, int],
        links: Mapping[Direction, Trace],
        start: int = 0,
    ) -> None:
        self._order, self._plan, self._times, self._links = order, plan, times, links
        n = plan.n_stages
        self._spans = plan.spans(Kind.F, 0)
        self._ready: list[set[tuple[Kind, Span]]] = [set() for _ in range(n)]
        self._ready[0] = {(Kind.F, span) for span in self._spans}
        self._done = [{Kind.F: 0, Kind.B: 0} for _ in range(n)]
        self._last = [Kind.B] * n
        self._busy = [False] * n
        self._free = dict.fromkeys(links, 0)
        self._agenda: list[tuple[int, int, int, Kind, Span, bool]] = []
        self._count = 0
        self.events: list[Recorded] = []
        for stage in range(n):
            self._begin(stage, start)
        end = start
        while self._agenda:
            end, _, stage, kind, span, arrives = heappop(self._agenda)
            if arrives:
                self._ready[stage].add((kind, span))
            else:
                self._ended(stage, kind, span, end)
            self._begin(stage, end)
        assert all(done[Kind.B] == len(self._spans) for done in self._done), "the order has a deadlock"
        self.end = end

    def by_rank(self) -> list[list[Recorded]]:
        """Return the events that each rank records."""
        return [[e for e in self.events if e[0] == rank] for rank in range(self._plan.n_stages)]

    def _later(self, at: int, stage: int, kind: Kind, span: Span, arrives: bool) -> None:
        self._count += 1
        heappush(self._agenda, (at, self._count, stage, kind, span, arrives))

    def _begin(self, stage: int, now: int) -> None:
        picked = None if self._busy[stage] else self._pick(stage)
        if picked is not None:
            kind, span = picked
            self._ready[stage].discard(picked)
            self._done[stage][kind] += 1
            self._busy[stage], self._last[stage] = True, kind
            end = now + self._times[kind]
            self.events.append((stage, Instruction(kind, stage, span=span), now, end))
            self._later(end, stage, kind, span, arrives=False)

    def _pick(self, stage: int) -> tuple[Kind, Span] | None:
        done, ready = self._done[stage], self._ready[stage]
        if isinstance(self._order, Program):
            row, at = self._order.head[stage], done[Kind.F] + done[Kind.B]
            return (row[at].kind, row[at].span) if (row[at].kind, row[at].span) in ready else None
        nexts = {kind: (kind, self._spans[n]) for kind, n in done.items() if n < len(self._spans)}
        found = {kind: each for kind, each in nexts.items() if each in ready}
        held = sum(span.rows for span in self._spans[done[Kind.B] : done[Kind.F]])
        if Kind.F in found and held + found[Kind.F][1].rows > self._order.limits[stage]:
            del found[Kind.F]
        first = Kind.F if self._last[stage] is Kind.B and self._order.alternate else Kind.B
        return found.get(first) or next(iter(found.values()), None)

    def _ended(self, stage: int, kind: Kind, span: Span, now: int) -> None:
        self._busy[stage] = False
        if kind is Kind.F and stage == self._plan.n_stages - 1:
            self._ready[stage].add((Kind.B, span))
            return
        target = stage + 1 if kind is Kind.F else stage - 1
        if target >= 0:
            begins = max(now, self._free[stage, target])
            arrives = self._free[stage, target] = self._links[stage, target].arrival(begins)
            sent = Instruction(Kind.SF if kind is Kind.F else Kind.SB, stage, span=span)
            self.events.append((target, sent, begins, arrives))
            self._later(arrives, target, kind, span, arrives=True)
