"""A simulator of fixed orders in each regime that advances by one nanosecond, without a heap or longest paths."""

from __future__ import annotations

from collections import defaultdict, deque

from lightning_pipes.ir import Instruction, Kind, Plan, Program


class Ticking:
    """A single run of a program without transfers.

    All times are whole nanoseconds, and computations take at least 1.

    Args:
        takes: the time of each computation, and for each send the time that it occupies the wire.
        latency: the time from the last byte of a message on the wire to its arrival.
        blocks: if True, a rank continues to compute only after all of its messages have left.
        shares: if True, two ranks share one wire for both directions.
    """

    def __init__(self, program: Program, plan: Plan, takes, latency, *, blocks: bool, shares: bool) -> None:
        self.plan, self.takes, self.latency, self.blocks, self.shares = plan, takes, latency, blocks, shares
        self.rows = [deque(row) for row in program.head]
        self.running: list[tuple[int, Instruction] | None] = [None] * plan.n_ranks  # end and instruction
        self.waiting = defaultdict(deque)  # by wire: messages that wait, in the order in which they were completed
        self.moving = {}  # by wire: end and message
        self.away = []  # arrival and message
        self.unsent = [0] * plan.n_ranks
        self.done, self.there = set(), set()
        self.starts, self.began = {}, {}

    def run(self) -> dict[Instruction, int]:
        """Return the start of each computation and each message."""
        now = 0
        while any(self.rows) or any(self.running) or self.moving or any(self.waiting.values()) or self.away:
            while self._settle(now):  # messages without duration arrive in the same instant
                pass
            now += 1
            assert now < 100_000, "nothing goes on"
        return self.starts

    def _settle(self, now: int) -> bool:
        moved = False
        over = [(self.began[i], rank, i) for rank, (until, i) in self._computing() if until == now]
        for _, rank, i in sorted(over):
            self.running[rank] = None
            self.done.add(i)
            self._complete(rank, i)
            moved = True
        for wire, (until, message) in list(self.moving.items()):
            if until == now:
                del self.moving[wire]
                self.unsent[self.plan.ranks[message.stage]] -= 1
                self.away.append((now + self.latency[message], message))
                moved = True
        for arrival, message in list(self.away):
            if arrival == now:
                self.away.remove((arrival, message))
                self.there.add(message)
                moved = True
        for wire, queue in self.waiting.items():
            if queue and wire not in self.moving:
                message = queue.popleft()
                self.starts[message] = now
                self.moving[wire] = now + self.takes[message], message
                moved = True
        if moved:
            return True
        for rank, row in enumerate(self.rows):
            held = self.blocks and self.unsent[rank]
            if row and self.running[rank] is None and not held and self._inputs(row[0]):
                i = row.popleft()
                self.starts[i], self.began[i] = now, len(self.began)
                self.running[rank] = now + self.takes[i], i
        return False

    def _computing(self):
        return ((rank, each) for rank, each in enumerate(self.running) if each is not None)

    def _complete(self, rank: int, i: Instruction) -> None:
        """Queue the messages that the end of a computation produces."""
        step = {Kind.F: 1, Kind.B: -1}.get(i.kind, 0)
        target = i.stage + step
        if step and 0 <= target < self.plan.n_stages and self.plan.ranks[target] != rank:
            pair = rank, self.plan.ranks[target]
            self.waiting[frozenset(pair) if self.shares else pair].append(
                i._replace(kind=Kind.SF if step > 0 else Kind.SB)
            )
            self.unsent[rank] += 1

    def _inputs(self, i: Instruction) -> bool:
        step = {Kind.F: -1, Kind.B: 1}.get(i.kind, 0)
        source = i.stage + step
        if not step or not 0 <= source < self.plan.n_stages:
            return True
        other = i._replace(stage=source)
        if self.plan.ranks[source] == self.plan.ranks[i.stage]:
            return other in self.done
        return other._replace(kind=Kind.SF if i.kind is Kind.F else Kind.SB) in self.there
