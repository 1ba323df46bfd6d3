"""Orders of v(k): repeating patterns on a V, executed with the durations of computations and a limit of memory."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, zip_longest
from typing import NamedTuple

from lightning_pipes.ir import PlanError

PERIOD = 6
"""The slots of a pattern: F, I and W of a micro-batch on the two stages of a rank."""
PATTERNS = (
    (5, 2, 1, 1, 2),
    (3, 1, 1, 1, 3),
    (1, 1, 1, 1, 1),
    (3, 1, 5, 1, 5),
    (3, 1, 1, 1, 1),
    (5, 3, 1, 1, 3),
    (1, 1, 3, 1, 3),
    (1, 1, 5, 1, 1),
    (3, 1, 1, 1, 5),
    (3, 1, 5, 1, 1),
    (2, 1, 1, 1, 5),
    (5, 3, 3, 3, 3),
    (1, 1, 1, 1, 3),
    (3, 1, 3, 1, 3),
    (2, 1, 1, 1, 2),
    (3, 1, 5, 3, 5),
    (5, 3, 5, 1, 1),
    (1, 1, 1, 1, 5),
    (3, 1, 3, 3, 1),
    (1, 1, 1, 3, 1),
    (2, 1, 4, 4, 2),
)
"""The patterns that are compared, those that are the best for most numbers of ranks, k and durations first.

A pattern has the number of slots from a computation to the same computation on the next stage. It is 1 from a rank to
the previous one, and one of the first two entries from a rank to the next one: the first entry on the first links, and
the second entry on the others. The other entries are the numbers of slots at the turn of forwards, from the last
forward to the first gradient, and at the turn of gradients. The patterns were selected from all patterns with numbers
of at most 6 in which no rank computes twice in a slot: each gave the shortest step for some k on 2 to 8 ranks, with
equal or with unequal durations.
"""
PATIENCES = (0.1, 0.5, 1e6)
"""The shares of a computation that a waiting rank must be able to finish before the next one in its row can start.

If this share of a later F or I, or of a W, fits, the rank runs it first. With the last value, it never does.
"""
MAX_COMPARED_COMPUTATIONS = 100_000
"""The number of executed computations after which no further patterns are compared."""
MAX_FINALISTS = 4
"""The number of patterns that are compared with all micro-batches, after a comparison with few of them."""
UNUSED_HALF_STAGES = 2
"""The number of half-stages by which a pattern that is compared may hold less than k."""
LOOKAHEAD = 12
"""The number of later computations in its row among which a waiting rank chooses."""

N_STREAMS = 4
W_NUMBER = -1
NEVER = 1 << 62
"""A time that is later than all others."""

F, I, W = range(3)  # noqa: E741 - the letters of the field
Rows = tuple[tuple[int, ...], ...]
"""The F and I of every rank, as numbers that `Execution` explains."""


class Durations(NamedTuple):
    """The durations of F, I and W of a stage and of a message, in any unit."""

    forward: int = 1
    inputs: int = 1
    weights: int = 1
    message: int = 0


class Length(NamedTuple):
    """The length of an order, for comparisons.

    Attributes:
        total: the sum of the other two. The makespan is the time of a single step. In a sequence of steps, the first
            ranks begin the next step while the last ranks end the previous one, so that the longest wait matters.
        idle: the longest time that a rank waits between its first and its last computation.
        makespan: the time at which the last rank ends.
    """

    total: int
    idle: int
    makespan: int


class VOrder(NamedTuple):
    """The computations of every rank.

    Attributes:
        length: the length of the order.
        rows: the computations of every rank, each with its kind (F, I or W), its stage, and the number of its
            micro-batch.
    """

    length: Length
    rows: tuple[tuple[tuple[int, int, int], ...], ...]


class Pattern(NamedTuple):
    """The slots in which every rank computes its four streams of the first micro-batch.

    Other micro-batches follow every `PERIOD`. The streams are described in `Execution`.

    Attributes:
        held: the largest number of half-stages that a rank holds between F and I.
        slots: the slots of every rank.
    """

    held: int
    slots: tuple[tuple[int, int, int, int], ...]


@lru_cache(maxsize=64)
def find_order(p: int, m: int, k: int, times: Durations, split: bool) -> VOrder:
    """Return the order of m micro-batches on p ranks with the smallest `Length`.

    Args:
        p: the number of ranks.
        m: the number of micro-batches.
        k: the largest number of half-stages that a rank may hold.
        times: the durations of the computations.
        split: whether the backward runs as I and W.

    Raises:
        PlanError: every pattern needs more memory.
    """
    most = min(k, 2 * p)
    n_finalists = max(1, min(MAX_FINALISTS, MAX_COMPARED_COMPUTATIONS // (PERIOD * p * m)))
    best: tuple[Length, Execution] | None = None
    for number, (pattern, patience) in enumerate(compare_patterns(p, min(m, 2 * p), k, times, split)):
        if best is not None and number >= n_finalists:
            break
        execution = Execution(make_rows(pattern, most, m), m, k, times, split, patience)
        length = execution.run(NEVER)
        if length is not None and (best is None or length < best[0]):
            best = length, execution
    if best is not None:
        return VOrder(best[0], best[1].read_rows())
    raise PlanError(f"v: no order of {m} micro-batches on {p} ranks holds at most {k} half-stages; raise k")


@lru_cache(maxsize=512)
def compare_patterns(p: int, m: int, k: int, times: Durations, split: bool) -> tuple[tuple[Pattern, float], ...]:
    """Return the best patterns of a comparison, each with its patience, the best one first.

    They are compared with few micro-batches, because all further micro-batches only repeat the pattern. Patterns that
    hold much less than k are compared only if no other pattern can be executed. The arguments are described in
    `find_order`.
    """
    most = min(k, 2 * p)
    patterns = [pattern for pattern in find_patterns(p) if pattern.held <= most]
    patterns.sort(key=lambda pattern: pattern.held < most - UNUSED_HALF_STAGES)
    found: list[tuple[Length, int, Pattern, float]] = []
    work = 2 * m * (times.forward + times.inputs + times.weights)
    executed = 0
    for pattern in patterns:
        if found and (executed > MAX_COMPARED_COMPUTATIONS or pattern.held < most - UNUSED_HALF_STAGES):
            break
        rows = make_rows(pattern, most, m)
        for patience in PATIENCES:
            execution = Execution(rows, m, k, times, split, patience)
            longest = found[MAX_FINALISTS - 1][0].total if len(found) >= MAX_FINALISTS else NEVER
            length = execution.run(longest - work)
            executed += sum(map(len, execution.ran))
            if length is not None:
                insort(found, (length, len(found), pattern, patience))
    return tuple((pattern, patience) for *_, pattern, patience in found)


def least_held(p: int) -> int:
    """Return the number of half-stages that a rank holds in the pattern with the least memory."""
    return min(pattern.held for pattern in find_patterns(p))


@lru_cache(maxsize=64)
def find_patterns(p: int) -> tuple[Pattern, ...]:
    """Return the patterns of p ranks in which no rank computes twice in a slot, for each number of first links."""
    found = {}
    for first, others, f_turn, turn, i_turn in PATTERNS:
        for n_first in range(1, p) if others < first else (p - 1,):
            down, up = [*(first,) * n_first, *(others,) * (p - 1 - n_first)], (1,) * (p - 1)
            slots = tuple(accumulate([0, *down, f_turn, *up, turn, *down, i_turn, *up]))
            ranks = tuple((slots[r], slots[2 * p - 1 - r], slots[2 * p + r], slots[4 * p - 1 - r]) for r in range(p))
            if all(len({slot % PERIOD for slot in streams}) == N_STREAMS for streams in ranks):
                found[ranks] = Pattern(max(map(_count_held, ranks)), ranks)
    return tuple(found.values())


def _count_held(slots: Sequence[int]) -> int:
    """Return the largest number of half-stages that a rank with these slots holds between F and I."""
    return max(
        sum((now - begin) // PERIOD - (now - end) // PERIOD for begin, end in zip(slots[:2], slots[:1:-1], strict=True))
        for now in slots[:2]
    )


def make_rows(pattern: Pattern, k: int, m: int) -> Rows:
    """Return the F and I of every rank for m micro-batches in the order of a pattern, within k half-stages.

    As in the paper, the first and the last computations get another order.
    """
    every, p, found = N_STREAMS * m, len(pattern.slots), []
    for rank, slots in enumerate(pattern.slots):
        keys = [(slot + PERIOD * n) * every + stream * m + n for stream, slot in enumerate(slots) for n in range(m)]
        row = [key % every for key in sorted(keys)]
        start = _first_computations(row, p, rank, k, m)
        end = _last_computations(p, rank, k, m)
        moved = {*start, *end}
        found.append((*(x for x in start if x not in end), *(x for x in row if x not in moved), *end))
    return tuple(found)


def _first_computations(row: Sequence[int], p: int, rank: int, k: int, m: int) -> list[int]:
    """Return the computations of a rank before the first I of its first stage.

    They are the computations that `row` has there, and F until the rank holds k half-stages. F of the first stage come
    first, until the first micro-batch returns from the last rank. After these F, I of the second stage alternate with
    F.
    """
    before = row[: row.index(3 * m)]
    second = min(rank + 1, k // 2, m)
    first = min(k - second, m)
    alone = min(2 * (p - 1 - rank), first)
    start = [*range(alone)]
    for n in range(rank + 1):
        start += [alone + n] * (alone + n < first) + [m + n] * (n < second)
    n_first, n_second = (sum(x // m == stream for x in before) for stream in (0, 1))
    forwards = [*range(m + second, m + n_second), *range(min(first, alone + rank + 1), max(first, n_first))]
    inputs = [x for x in before if x // m == 2]
    return [*start, *(x for pair in zip_longest(inputs, forwards) for x in pair if x is not None)]


def _last_computations(p: int, rank: int, k: int, m: int) -> list[int]:
    """Return the last I of a rank, in the order in which the gradients of the last micro-batches arrive."""
    first = min((k + 1) // 2, m)
    second = min(rank + 1, k - first, m)
    arrivals = [(2 * p - rank - 2 * n, 4 * m - 1 - n) for n in range(first)]
    arrivals += [(rank + 1 - 2 * n, 3 * m - 1 - n) for n in range(second)]
    return [computation for _, computation in sorted(arrivals)]


class Execution:
    """Executes the F and I of rows under a limit of held half-stages. W fills the time in which ranks would wait.

    A computation of a row is the number `stream * m + n` for micro-batch n. The streams of a rank are F of its first
    stage, F of its second stage, I of its second stage and I of its first stage, so that a micro-batch passes the
    streams in this order. W is the number -1: a rank runs the W of its I in their order.

    Args:
        rows: the computations of every rank.
        m: the number of micro-batches.
        limit: the largest number of half-stages that a rank may hold.
        times: the durations.
        split: whether the backward runs as I and W.
        patience: see `PATIENCES`.
    """

    def __init__(self, rows: Rows, m: int, limit: int, times: Durations, split: bool, patience: float) -> None:
        self.rows, self.m, self.limit, self.split, self.patience = rows, m, limit, split, patience
        inputs = times.inputs if split else times.inputs + times.weights
        self.durations = (times.forward, times.forward, inputs, inputs)
        self.weights, self.message = times.weights, times.message
        p = len(rows)
        self.ready = [[NEVER] * (N_STREAMS * m) for _ in range(p)]
        self.ready[0][:m] = [0] * m
        self.at, self.clock, self.held, self.pending = [0] * p, [0] * p, [0] * p, [0] * p
        self.done = [bytearray(len(row)) for row in rows]
        self.ran: list[list[int]] = [[] for _ in rows]

    def run(self, most_idle: float) -> Length | None:
        """Run everything, and write the computations of every rank to `ran`.

        Args:
            most_idle: the longest time that a rank may wait after its first computation.

        Returns:
            The length of the order. None if a rank waits longer than `most_idle` or lacks memory.
        """
        m, p, split = self.m, len(self.rows), self.split
        rows, at, clock, held, pending, done, ran = (
            self.rows,
            self.at,
            self.clock,
            self.held,
            self.pending,
            self.done,
            self.ran,
        )
        idle, starts, places = [0] * p, [NEVER] * p, [0] * p
        changed: Sequence[int] = range(p)
        while True:
            for r in changed:
                starts[r], places[r] = self._next(r)
            start = min(starts)
            if start == NEVER:
                break
            rank = starts.index(start)
            if ran[rank]:
                idle[rank] += start - clock[rank]
                if idle[rank] > most_idle:
                    return None
            place, changed = places[rank], (rank,)
            if place < 0:
                clock[rank] = start + self.weights
                held[rank] -= 1
                pending[rank] -= 1
                ran[rank].append(W_NUMBER)
                continue
            computation = rows[rank][place]
            stream = computation // m
            end = clock[rank] = start + self.durations[stream]
            ran[rank].append(computation)
            done[rank][place] = 1
            at[rank] = done[rank].find(0, at[rank])
            if stream < 2:
                held[rank] += 1
            elif split:
                pending[rank] += 1
            else:
                held[rank] -= 1
            after = rank - 1 if stream % 2 else rank + 1
            if 0 <= after < p:
                self.ready[after][computation] = end + self.message
                changed = rank, after
            elif stream < N_STREAMS - 1:
                self.ready[rank][computation + m] = end
        if any(place >= 0 for place in at):
            return None
        return Length(max(idle) + max(clock), max(idle), max(clock))

    def _next(self, rank: int) -> tuple[int, int]:
        """Return the start and the place of the next computation of a rank; -1 is a W. An unknown start is `NEVER`."""
        at, clock, pending = self.at[rank], self.clock[rank], self.pending[rank]
        if at < 0:
            return (clock, -1) if pending else (NEVER, -1)
        computation = self.rows[rank][at]
        if computation < 2 * self.m and self.held[rank] >= self.limit:
            return (clock, -1) if pending else (NEVER, -1)
        start = self.ready[rank][computation]
        if start <= clock:
            return clock, at
        if start == NEVER:
            return NEVER, -1
        early, place = self._find_early(rank, start)
        if early < NEVER:
            return (clock, -1) if pending and early - clock >= self.weights else (early, place)
        if pending and start - clock >= min(1.0, self.patience) * self.weights:
            return clock, -1
        return start, at

    def _find_early(self, rank: int, before: int) -> tuple[int, int]:
        """Return the start and the place of the first later F or I that fits into the time before `before`.

        An F must leave enough memory for all computations that the order has in front of it. The start is `NEVER` if
        nothing fits.
        """
        m, row, done, ready = self.m, self.rows[rank], self.done[rank], self.ready[rank]
        at, clock, held = self.at[rank], self.clock[rank], self.held[rank]
        best, found = NEVER, -1
        first = row[at] // m
        seen = 1 << first
        level = held + 1 - self.pending[rank] + (1 if first < 2 else -1)
        highest = level if first < 2 else 0
        for place in range(at + 1, min(at + 1 + LOOKAHEAD, len(row))):
            if done[place]:
                continue
            computation = row[place]
            stream = computation // m
            is_forward = stream < 2
            if not seen >> stream & 1:
                seen |= 1 << stream
                start = max(ready[computation], clock)
                if (
                    start + self.patience * self.durations[stream] <= before
                    and (start < best or (start == best and not is_forward and row[found] < 2 * m))
                    and (not is_forward or (held < self.limit and highest <= self.limit))
                ):
                    best, found = start, place
            if is_forward:
                level += 1
                highest = max(highest, level)
            else:
                level -= 1
        return best, found

    def read_rows(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """Return the computations of `VOrder`."""
        m, last, found = self.m, 2 * len(self.rows) - 1, []
        for rank, ran in enumerate(self.ran):
            streams = [(F, rank), (F, last - rank), (I, last - rank), (I, rank)]
            row: list[tuple[int, int, int]] = []
            pending: deque[tuple[int, int]] = deque()
            for computation in ran:
                if computation == W_NUMBER:
                    row.append((W, *pending.popleft()))
                    continue
                stream, n = divmod(computation, m)
                kind, stage = streams[stream]
                row.append((kind, stage, n))
                if kind == I:
                    pending.append((stage, n))
            found.append(tuple(row))
        return tuple(found)
