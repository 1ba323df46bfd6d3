"""Time and memory of overlapped directions: the front of schemes of which none is both slower and larger.

The paper leaves memory open (its section VI), and with all forwards first every stage holds the whole batch whatever
the sizes. Once a forward starts only while rows in flight are below its stage's cap, a batch takes longer and less
memory. Caps are as free as sizes. What has arrived and waits for the rest of its chunk is counted: neighbours of other
sizes need that room.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.papers.umpipe.overlap.search import Descent, Effort
from lightning_pipes.ir import InputError, short_repr
from lightning_pipes.strategies.umpipe.network import Network, Scheme
from lightning_pipes.strategies.umpipe.overlapped.kernel import NEVER
from lightning_pipes.strategies.umpipe.overlapped.run import Merge
from lightning_pipes.strategies.umpipe.overlapped.tables import FREE, Memory

FLYING = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Equal schemes are begun with so many chunks in flight on every stage."""
ROUNDS = (1, 2, 3)
"""And with so many for each stage that is still to come, as 1F1B and kFkB do."""
AT_FULL_SPEED = 0.25
"""The share of the effort that goes into the fastest scheme of all."""
LINGERED = 300
"""Evaluations under one limit, for each option."""


@dataclass(frozen=True)
class RowBytes:
    """The room that a row takes on each stage, in bytes or any unit.

    Attributes:
        held: from the start of its forward to the end of its backward: activations.
        arrived: from its arrival to the start of its forward: the stage's input. Stage 0 reads its rows when it starts.
        returned: from the arrival of its gradient to the start of its backward.

    Raises:
        InputError: not equally many, or no whole numbers from 0 on.
    """

    held: tuple[int, ...]
    arrived: tuple[int, ...]
    returned: tuple[int, ...]

    def __post_init__(self) -> None:
        every = (self.held, self.arrived, self.returned)
        whole = all(isinstance(n, int) and n >= 0 for row in every for n in row)
        if not self.held or {len(row) for row in every} != {len(self.held)} or not whole or min(self.held) < 1:
            raise InputError(
                "held, arrived and returned are whole numbers of each stage, from 0 on and held from 1 on; got "
                f"{short_repr(every)}"
            )

    @classmethod
    def rows(cls, stages: int) -> RowBytes:
        """Counts rows: in flight or waiting, all alike."""
        return cls((1,) * stages, (1,) * stages, (1,) * stages)


@dataclass(frozen=True)
class Point:
    """A scheme of the front.

    Attributes:
        value: its makespan, in the network's unit.
        peak: of each stage the most that it holds, in the unit of the `RowBytes`.
        scheme, policy, caps: what to run.
    """

    value: int
    peak: tuple[int, ...]
    scheme: Scheme
    policy: Merge
    caps: tuple[int, ...]

    @property
    def most(self) -> int:
        """The peak of the stage that holds most."""
        return max(self.peak)


class Archive:
    """Points none of which is as slow and as large as another one, or more; from the fastest to the smallest."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    def add(self, point: Point) -> bool:
        """Keeps it if no other is as good, and drops those that it beats; whether it is new."""
        if any(p.value <= point.value and p.most <= point.most for p in self.points):
            return False
        self.points = [p for p in self.points if p.value < point.value or p.most < point.most]
        self.points.append(point)
        self.points.sort(key=lambda p: p.value)
        return True


def front(
    network: Network,
    starts: Iterable[Scheme] = (),
    *,
    row_bytes: RowBytes | None = None,
    seconds: float | None = None,
    evaluations: int | None = None,
    seed: int = 0,
) -> tuple[Point, ...]:
    """The fastest schemes of every size that were found, from the fastest to the smallest; none is dominated.

    It begins with the fastest scheme that a search finds, and with equal schemes and `starts` under uniform caps and
    those of 1F1B. Then it takes a point at random, and searches the fastest scheme that holds less on every stage than
    that one does on its largest, from that one and from the next smaller one, over the options of processes and the
    caps of stages. So every limit profits from the ones beside it. With `evaluations` alone the same seed finds the
    same.

    Args:
        row_bytes: what a row takes; by default rows are counted.

    Raises:
        InputError: no limit of effort, sizes of rows for another number of stages, or starts of another network.
    """
    effort = Effort(evaluations, seconds)
    over = effort.over()
    sizes = RowBytes.rows(network.stages) if row_bytes is None else row_bytes
    if len(sizes.held) != network.stages:
        raise InputError(f"row_bytes has {len(sizes.held)} stages, the network {network.stages}")
    rng = random.Random(seed)
    archive = Archive()
    descent = Descent(network, _memory(network, sizes, FREE), tune_caps=True)
    fastest = descent.found([*starts], effort.part(AT_FULL_SPEED), seed)
    descent.take(fastest.scheme, fastest.caps)
    _keep(descent, archive)
    done = descent.evaluations + _first(network, sizes, [*starts], archive)
    while not over(done):
        at = rng.randrange(len(archive.points) + 1)
        limit = archive.points[at - 1].most - 1 if at else FREE
        near = archive.points[max(at - 1, 0) : at + 2]
        if limit < max(sizes.held) * network.sizes[-1]:
            near = []
        done += _closer(network, sizes, limit, near, archive, rng) if near else 1
    return tuple(archive.points)


def within(points: Sequence[Point], limit: int | Sequence[int]) -> Point:
    """The fastest of the points that holds at most `limit` on all stages, or at most each stage's own.

    Raises:
        InputError: none does.
    """
    fits = []
    for point in points:
        each = [limit] * len(point.peak) if isinstance(limit, int) else limit
        if all(p <= m for p, m in zip(point.peak, each, strict=True)):
            fits.append(point)
    if not fits:
        least = min(points, key=lambda point: point.most, default=None)
        found = (
            "there are none"
            if least is None
            else f"the smallest of {len(points)} points takes {short_repr(least.peak)}"
        )
        raise InputError(
            f"no scheme fits into a memory limit of {short_repr(limit)}: {found}; raise the limit, or cut finer"
        )
    return min(fits, key=lambda point: point.value)


def _first(network: Network, sizes: RowBytes, starts: Sequence[Scheme], archive: Archive) -> int:
    """Fills the archive with what needs no search; how many evaluations that took."""
    descent = Descent(network, _memory(network, sizes, FREE))
    options = range(len(network.sizes))
    stages, rows = network.stages, network.rows
    for scheme in [*starts, *map(network.equal_scheme, options)]:
        chunks = network.sizes_of(scheme)[0][::2]
        largest = max(chunks)
        warm = [[largest * n * (stages - i) for i in range(stages)] for n in ROUNDS]
        uniform = [[max(chunk, min(chunks) * n) for chunk in chunks] for n in FLYING]
        for caps in dict.fromkeys(tuple(min(cap, rows) for cap in each) for each in warm + uniform):
            descent.take(scheme, caps)
            _keep(descent, archive)
    return descent.evaluations


def _closer(
    network: Network, sizes: RowBytes, limit: int, near: Sequence[Point], archive: Archive, rng: random.Random
) -> int:
    """Searches under `limit` from points near it; how many evaluations that took."""
    memory = _memory(network, sizes, limit)
    descent = Descent(network, memory, tune_caps=True)
    over = Effort(LINGERED * len(network.sizes)).over()
    best, scheme, caps = NEVER, near[0].scheme, near[0].caps
    waiting = [*near]
    while waiting or (best < NEVER and not over(descent.evaluations)):
        changed = None
        if waiting:
            point = waiting.pop()
            descent.take(point.scheme, [min(cap, most) for cap, most in zip(point.caps, memory.caps, strict=True)])
        else:
            descent.take(scheme, caps)
            changed = descent.kick(rng)
        if descent.value < NEVER:
            descent.descend(rng, over, changed)
            _keep(descent, archive)
        if descent.value <= best:
            best, scheme, caps = descent.value, descent.scheme, descent.caps
    return max(1, descent.evaluations)


def _keep(descent: Descent, archive: Archive) -> None:
    if descent.value < NEVER:
        archive.add(Point(descent.value, descent.peaks(), descent.scheme, descent.policy, descent.caps))


def _memory(network: Network, sizes: RowBytes, limit: int) -> Memory:
    """Memory of stages that may hold `limit` each; caps as high as that allows."""
    caps = tuple(max(1, min(network.rows, limit // each)) for each in sizes.held)
    return Memory(caps, sizes.held, sizes.arrived, sizes.returned, (limit,) * network.stages)
