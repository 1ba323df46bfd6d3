"""Orders of v(k): repeating patterns on a V, executed with the durations of computations and a limit of memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from itertools import accumulate
from typing import NamedTuple

from lightning_pipes.ir import PlanError

PERIOD = 6
"""The slots of a pattern: F, I and W of a micro-batch on the two stages of a rank."""
PATTERNS = (
    (1, 1, 1, 1, 1, 1, 1),
    (1, 1, 1, 1, 1, 4, 2),
    (1, 1, 1, 1, 1, 5, 1),
    (1, 1, 1, 3, 1, 1, 1),
    (1, 1, 1, 3, 1, 3, 1),
    (1, 1, 1, 5, 1, 1, 1),
    (1, 1, 2, 1, 1, 2, 2),
    (1, 1, 2, 1, 1, 5, 2),
    (1, 1, 2, 4, 1, 2, 2),
    (1, 1, 3, 1, 1, 3, 3),
    (1, 1, 3, 1, 1, 4, 5),
    (1, 1, 3, 1, 1, 5, 3),
    (1, 1, 3, 2, 3, 1, 5),
    (1, 1, 3, 3, 1, 3, 3),
    (1, 1, 3, 3, 1, 5, 3),
    (1, 1, 3, 5, 1, 1, 3),
    (1, 1, 3, 5, 1, 2, 5),
    (1, 1, 3, 5, 1, 3, 3),
    (1, 1, 3, 5, 1, 5, 3),
    (1, 1, 5, 1, 1, 1, 5),
    (1, 2, 2, 2, 1, 5, 3),
    (1, 2, 5, 1, 1, 4, 5),
    (1, 2, 5, 2, 1, 1, 3),
    (1, 3, 1, 1, 1, 1, 1),
    (1, 3, 1, 3, 1, 3, 1),
    (1, 3, 1, 3, 1, 5, 1),
    (1, 3, 3, 2, 3, 2, 3),
    (1, 3, 3, 3, 1, 1, 3),
    (1, 3, 3, 3, 1, 3, 3),
    (1, 3, 3, 5, 1, 3, 3),
    (1, 4, 2, 3, 2, 4, 1),
    (1, 4, 2, 4, 1, 2, 2),
    (1, 5, 1, 1, 1, 1, 1),
    (1, 5, 1, 3, 1, 3, 1),
    (1, 5, 3, 1, 1, 1, 3),
    (1, 5, 3, 5, 1, 5, 3),
    (2, 5, 2, 2, 1, 2, 2),
    (3, 1, 5, 2, 1, 1, 3),
    (3, 2, 3, 5, 1, 1, 3),
    (3, 2, 3, 5, 1, 5, 3),
    (3, 4, 3, 1, 1, 3, 3),
    (4, 1, 2, 4, 1, 1, 2),
)
"""The patterns that are compared.

A pattern has the number of slots from a computation to the same computation on the next stage. The entries are for
forwards down the V, at its turn, and up again, from the last forward to the first gradient, and for gradients down the
V, at its turn, and up again. They were selected from all patterns with numbers of at most 6 in which no rank computes
twice in a slot: each gave the shortest step for some k on 4, 6 or 8 ranks, with equal or with unequal durations.
"""
PATIENCES = (0.5, 0.1, 1e6)
"""The shares of a computation that a waiting rank must be able to finish before the next one in its row can start.

If this share of a later F or I, or of a W, fits, the rank runs it first. With the last value, it never does.
"""
MAX_COMPARED_COMPUTATIONS = 200_000
"""The number of executed computations after which no further patterns are compared."""
LOOKAHEAD = 12
"""The number of later computations in its row among which a waiting rank chooses."""

F, I, W = range(3)  # noqa: E741 - the letters of the field
Computation = tuple[int, int, int]
"""A kind (F, I or W), a stage, and the number of a micro-batch."""
Rows = tuple[tuple[Computation, ...], ...]


class Durations(NamedTuple):
    """The durations of F, I and W of a stage and of a message, in any unit."""

    forward: int = 1
    inputs: int = 1
    weights: int = 1
    message: int = 0


class VOrder(NamedTuple):
    """The computations of every rank.

    Attributes:
        idle: the longest time that a rank waits between its first and its last computation.
        makespan: the time at which the last rank ends.
        rows: the computations of every rank.
    """

    idle: int
    makespan: int
    rows: Rows


class Pattern(NamedTuple):
    """The slots in which every stage computes its first F and its first I. Other micro-batches follow every `PERIOD`.

    Attributes:
        held: the largest number of half-stages that a rank holds.
        forwards: the slot of the first F of every stage.
        inputs: the slot of the first I of every stage.
    """

    held: int
    forwards: tuple[int, ...]
    inputs: tuple[int, ...]


@lru_cache(maxsize=256)
def find_order(p: int, m: int, k: int, times: Durations, split: bool) -> VOrder:
    """Return the order of m micro-batches on p ranks in which the rank that waits longest waits least.

    The patterns are compared with a few micro-batches, because all further micro-batches only repeat the pattern.

    Args:
        p: the number of ranks.
        m: the number of micro-batches.
        k: the largest number of half-stages that a rank may hold.
        times: the durations of the computations.
        split: whether the backward runs as I and W.

    Raises:
        PlanError: every pattern needs more memory.
    """
    few = min(m, 2 * p)
    found: list[tuple[VOrder, Callable[[int], Rows], float]] = []
    executed = 0
    for make_rows in _sources(p, k):
        if found and executed > MAX_COMPARED_COMPUTATIONS:
            break
        rows = make_rows(few)
        for patience in PATIENCES:
            best = found[-1][0][:2] if found else (math.inf, math.inf)
            execution = Execution(rows, few, k, times, patience, split)
            order = execution.run(best[0])
            executed += sum(map(len, execution.ran))
            if order is not None and order[:2] < best:
                found.append((order, make_rows, patience))
    for order, make_rows, patience in reversed(found):
        longer = order if m == few else Execution(make_rows(m), m, k, times, patience, split).run(math.inf)
        if longer is not None:
            return longer
    raise PlanError(f"v: no order of {m} micro-batches on {p} ranks holds at most {k} half-stages; raise k")


def least_held(p: int) -> int:
    """Return the number of half-stages that a rank holds in the pattern with the least memory."""
    return min(pattern.held for pattern in find_patterns(p))


@lru_cache(maxsize=64)
def find_patterns(p: int) -> tuple[Pattern, ...]:
    """Return the patterns of p ranks in which no rank computes twice in a slot, those that hold the most first."""
    found = []
    for f_down, f_turn, f_up, turn, i_down, i_turn, i_up in PATTERNS:
        steps = [0, *(f_down,) * (p - 1), f_turn, *(f_up,) * (p - 1)]
        forwards = tuple(accumulate(steps))
        steps = [forwards[-1] + turn, *(i_down,) * (p - 1), i_turn, *(i_up,) * (p - 1)]
        inputs = tuple(accumulate(steps))[::-1]
        ranks = [(s, 2 * p - 1 - s) for s in range(p)]
        if all(len({slots[s] % PERIOD for slots in (forwards, inputs) for s in pair}) == 4 for pair in ranks):
            held = max(
                sum((forwards[first] - forwards[s]) // PERIOD - (forwards[first] - inputs[s]) // PERIOD for s in pair)
                for pair in ranks
                for first in pair
            )
            found.append(Pattern(held, forwards, inputs))
    return tuple(sorted(found, reverse=True))


def _sources(p: int, k: int) -> Iterator[Callable[[int], Rows]]:
    """Yield functions that return rows for a number of micro-batches, for each pattern that holds at most k."""
    if k >= 2 * p:
        yield partial(zero_bubble_rows, p)
    for pattern in find_patterns(p):
        if pattern.held <= k:
            yield partial(pattern_rows, pattern)


def pattern_rows(pattern: Pattern, m: int) -> Rows:
    """Return the F and I of every rank for m micro-batches, sorted by the slots of a pattern."""
    n_stages, rows = len(pattern.forwards), []
    for r in range(n_stages // 2):
        row = [
            (slots[s] + PERIOD * n, kind, s, n)
            for s in (r, n_stages - 1 - r)
            for kind, slots in ((F, pattern.forwards), (I, pattern.inputs))
            for n in range(m)
        ]
        rows.append(tuple(each[1:] for each in sorted(row)))
    return tuple(rows)


def zero_bubble_rows(p: int, m: int) -> Rows:
    """Return the F and I of every rank in ZB-V (Qi et al. 2023, arXiv:2401.10241, S6), which holds 2 p half-stages."""
    rows = []
    for r in range(p):
        down, up = r, 2 * p - 1 - r
        f_down, f_up, i_down, i_up = (F, down), (F, up), (I, down), (I, up)
        kinds = [f_down] * (2 * (p - r) - 1) + [f_up, f_down] * r + [f_up, i_up] * (p - r)
        kinds += [f_down, i_down, f_up, i_up] * m + [i_down, i_up] * r + [i_down] * (p - r)
        numbers = {kind: iter(range(m)) for kind in (f_down, f_up, i_down, i_up)}
        row = [(*kind, n) for kind in kinds if (n := next(numbers[kind], -1)) >= 0]
        rows.append(tuple(row))
    return tuple(rows)


class Execution:
    """Executes rows of F and I under a limit of held half-stages. W fills the time in which ranks would wait."""

    def __init__(self, rows: Rows, m: int, held: int, times: Durations, patience: float, split: bool) -> None:
        self.p, self.limit, self.times, self.patience = len(rows), held, times, patience
        self.split = split
        self.durations = (times.forward, times.inputs if split else times.inputs + times.weights, times.weights)
        self.rows = rows
        self.ends: list[list[list[int | None]]] = [[[None] * m for _ in range(2 * self.p)] for _ in (F, I)]
        self.at = [0] * self.p
        self.done = [bytearray(len(row)) for row in rows]
        self.clock, self.held = [0] * self.p, [0] * self.p
        self.idle = [0] * self.p
        self.pending: list[list[tuple[int, int]]] = [[] for _ in rows]
        self.ran: list[list[Computation]] = [[] for _ in rows]

    def run(self, most_idle: float) -> VOrder | None:
        """Return the order in which everything ran, or None if it would take too long or ranks lack memory.

        Args:
            most_idle: the longest time that a rank may wait after its first computation.
        """
        waiting = [self._next(r) for r in range(self.p)]
        while True:
            best, rank = None, -1
            for r, each in enumerate(waiting):
                if each is not None and (best is None or each[0] < best[0]):
                    best, rank = each, r
            if best is None:
                break
            self._execute(rank, *best)
            if self.idle[rank] > most_idle:
                return None
            for r in (rank - 1, rank, rank + 1):
                if 0 <= r < self.p:
                    waiting[r] = self._next(r)
        if any(at < len(row) for at, row in zip(self.at, self.rows, strict=True)):
            return None
        return VOrder(max(self.idle), max(self.clock), tuple(map(tuple, self.ran)))

    def _execute(self, rank: int, start: int, place: int) -> None:
        """Run the computation at `place` of the row of a rank, or its oldest W if `place` is negative."""
        if self.ran[rank]:
            self.idle[rank] += start - self.clock[rank]
        if place < 0:
            self.clock[rank] = start + self.durations[W]
            self.held[rank] -= 1
            self.ran[rank].append((W, *self.pending[rank].pop(0)))
            return
        kind, stage, n = self.rows[rank][place]
        self.clock[rank] = self.ends[kind][stage][n] = start + self.durations[kind]
        self.ran[rank].append((kind, stage, n))
        done, at = self.done[rank], self.at[rank]
        done[place] = 1
        while at < len(done) and done[at]:
            at += 1
        self.at[rank] = at
        if kind == F:
            self.held[rank] += 1
        elif self.split:
            self.pending[rank].append((stage, n))
        else:
            self.held[rank] -= 1

    def _next(self, rank: int) -> tuple[int, int] | None:
        """Return the start and the place of what a rank runs next, or None if this is not known yet."""
        row, at, clock, pending = self.rows[rank], self.at[rank], self.clock[rank], self.pending[rank]
        if at == len(row):
            return (clock, -1) if pending else None
        if row[at][0] == F and self.held[rank] >= self.limit:
            return (clock, -1) if pending else None
        start = self._ready(row[at])
        if start is None:
            return None
        if start <= clock:
            return clock, at
        weights = self.durations[W]
        early = self._find_early(rank, start)
        if early is not None:
            return (clock, -1) if pending and early[0] - clock >= weights else early
        if pending and start - clock >= min(1.0, self.patience) * weights:
            return clock, -1
        return start, at

    def _find_early(self, rank: int, before: int) -> tuple[int, int] | None:
        """Return the start and the place of the first later F or I that fits into the time before `before`.

        An F must leave enough memory for all computations that the order has in front of it.
        """
        row, at, clock, done = self.rows[rank], self.at[rank], self.clock[rank], self.done[rank]
        seen = {row[at][:2]}
        level = self.held[rank] + 1 - len(self.pending[rank]) + (1 if row[at][0] == F else -1)
        highest = level if row[at][0] == F else 0
        best = None
        for place in range(at + 1, min(at + 1 + LOOKAHEAD, len(row))):
            if done[place]:
                continue
            kind = row[place][0]
            if row[place][:2] not in seen:
                seen.add(row[place][:2])
                start = self._ready(row[place])
                if start is not None:
                    start = max(start, clock)
                    fits = kind == I or (self.held[rank] < self.limit and highest <= self.limit)
                    fits = fits and start + self.patience * self.durations[kind] <= before
                    if fits and (best is None or (start, -kind) < best[:2]):
                        best = (start, -kind, place)
            level += 1 if kind == F else -1
            if kind == F:
                highest = max(highest, level)
        return None if best is None else (best[0], best[2])

    def _ready(self, computation: Computation) -> int | None:
        """Return the time at which the input of an F or I arrives, or None if this is not known yet."""
        kind, stage, n = computation
        last, message, forwards = 2 * self.p - 1, self.times.message, self.ends[F]
        if kind == F:
            if not stage:
                return 0
            end = forwards[stage - 1][n]
            return None if end is None else end + (0 if stage == self.p else message)
        own = forwards[stage][n]
        if own is None or stage == last:
            return own
        end = self.ends[I][stage + 1][n]
        return None if end is None else max(own, end + (0 if stage == self.p - 1 else message))
