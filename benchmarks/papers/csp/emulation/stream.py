"""A stream of subnets in virtual time: when each stage computes what, by the rules of CSP or of another system."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from benchmarks.papers.csp.emulation.kernel import STREAM
from benchmarks.papers.csp.emulation.spaces import Array, Placed
from lightning_pipes.ir import DeadlockError, InputError, check_count, check_fields, short_repr

PLENTY = 1 << 40
"""More micro-batches than any stage holds."""
FIXED = 200_000
"""Nanoseconds that a task takes besides its share of the batch: to launch its kernels, and the engine's own work."""


@dataclass(frozen=True)
class Rules:
    """The rules of a system.

    Attributes:
        microbatches: pieces of a batch. Each takes its share of the batch's time and `overhead`.
        depth: subnets from the oldest under way to the newest, on each stage.
        checks: whether a forward waits for the update of its layers by the subnets before.
        bulk: subnets between two flushes, of systems that have them; 0 for none.
        forwards_first: whether a stage runs all forwards of a bulk before its backwards.
        held: micro-batches that each stage may hold between forward and backward; None for no limit.
        overhead: nanoseconds that each task takes besides.
        message, latency: nanoseconds in which a link moves the message of a whole batch, and until each is there.
        moving: how many times the swap time of a layer passes until its update has come to another stage.
        split: whether backward is in two parts, each of half its time and the whole `overhead`: input gradients, which
            go back at once, and weight gradients, see `CSP.split_backward`.

    Raises:
        InputError: a number below its least.
    """

    microbatches: int = 1
    depth: int = 30
    checks: bool = True
    bulk: int = 0
    forwards_first: bool = False
    held: tuple[int, ...] | None = None
    overhead: int = FIXED
    message: int = 0
    latency: int = 0
    moving: int = 2
    split: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        check_count("microbatches", self.microbatches)
        check_count("depth", self.depth)
        for what in ("bulk", "overhead", "message", "latency", "moving"):
            if getattr(self, what) < 0:
                raise InputError(f"{what} can't be below 0, got {short_repr(getattr(self, what))}")
        if self.forwards_first and not self.bulk:
            raise InputError("forwards_first is for bulks; say how many subnets one has")


class Waits(NamedTuple):
    """Who waits for whom, flat, numbered by subnet and stage as in `kernel`.

    Attributes:
        missing: updates of layers that each waits for.
        first: where the updates that come from each begin in `target`.
        target: who gets them.
        delay: nanoseconds until they are there.
    """

    missing: Array
    first: Array
    target: Array
    delay: Array

    @classmethod
    def of(cls, sources: Array, targets: Array, delays: Array, numbers: int) -> Waits:
        """One wait for each entry: of a target for a source, and so much longer."""
        order = np.argsort(sources, kind="stable")
        first = np.zeros(numbers + 1, np.int64)
        np.cumsum(np.bincount(sources, minlength=numbers), out=first[1:])
        return cls(np.bincount(targets, minlength=numbers), first, targets[order], delays[order])


def by_version(placed: Placed, moving: int) -> Waits:
    """A forward waits for every layer until it has the update of the last subnet before that uses it, on whatever stage
    that is (S2.1, Definition 2; the printed rule of a list of finished subnets by stage is unsound here)."""
    subnets, stages = placed.subnets, placed.stages
    users, blocks = np.nonzero(subnets.next_user >= 0)
    later = subnets.next_user[users, blocks]
    here, there = placed.stage_of[users, blocks], placed.stage_of[later, blocks]
    delays = np.where(here == there, 0, moving * subnets.swap[users, blocks])
    return Waits.of(users * stages + here, later * stages + there, delays, len(subnets) * stages)


def nothing(placed: Placed) -> Waits:
    """Nobody waits for layers."""
    none = np.zeros(0, np.int64)
    return Waits.of(none, none, none, len(placed.subnets) * placed.stages)


@dataclass(frozen=True, eq=False)
class Ran:
    """When everything ran, in nanoseconds, by subnet, stage and micro-batch.

    Attributes:
        forwards, backwards: starts and ends; axis 0 is these two. Where backwards are split those of input gradients.
        weights: of weight gradients, where backwards are split.
    """

    placed: Placed
    rules: Rules
    forwards: Array
    backwards: Array
    weights: Array | None = None

    @property
    def tasks(self) -> tuple[Array, ...]:
        """Starts and ends of each sort of tasks."""
        return (self.forwards, self.backwards, *([] if self.weights is None else [self.weights]))

    @cached_property
    def stepped(self) -> Array:
        """When each subnet's layers are up to date, by subnet and stage."""
        return np.asarray(self.tasks[-1][1].max(axis=2))

    @cached_property
    def makespan(self) -> int:
        """When all is over."""
        return int(self.stepped.max(initial=0))

    @cached_property
    def steady(self) -> tuple[int, int]:
        """From when the pipeline is full to when it begins to run dry: after the first tenth of the subnets has left
        stage 0, and before it has less than a whole `depth`, or a bulk, left to choose from."""
        ends = np.sort(self.stepped[:, 0])
        n = len(ends)
        left = self.rules.bulk or min(self.rules.depth, n // 3)
        whole = max(1, self.rules.bulk)  # cut between bulks, where there are any
        begin, end = -(-(n // 10) // whole) * whole, max(n - left, 1) // whole * whole
        if begin >= end:
            return 0, self.makespan
        return (int(ends[begin - 1]) if begin else 0), int(ends[end - 1])

    def busy(self, begin: int, end: int) -> Array:
        """Nanoseconds that each stage computes between the two instants."""
        total = np.zeros(self.placed.stages, np.int64)
        for starts, ends in self.tasks:
            total += (np.minimum(ends, end) - np.maximum(starts, begin)).clip(0).sum(axis=(0, 2))
        return total

    @property
    def bubble(self) -> float:
        """The share of the steady state in which stages idle, 0 to 1."""
        begin, end = self.steady
        return 1 - float(self.busy(begin, end).sum()) / (self.placed.stages * (end - begin))

    @property
    def lost(self) -> float:
        """The same with the tasks' `overhead` counted as if idle."""
        begin, end = self.steady
        return 1 - self.useful(begin, end) / (self.placed.stages * (end - begin))

    def useful(self, begin: int, end: int) -> float:
        """Nanoseconds of `busy` on all stages without the tasks' `overhead`."""
        total = 0.0
        for starts, ends in self.tasks:
            inside = (np.minimum(ends, end) - np.maximum(starts, begin)).clip(0)
            lengths = np.maximum(ends - starts, 1)
            total += float((inside * (1 - self.rules.overhead / lengths)).sum())
        return total

    @property
    def throughput(self) -> float:
        """Subnets a second in the steady state: those that leave stage 0."""
        begin, end = self.steady
        over = self.stepped[:, 0]
        return float(((over > begin) & (over <= end)).sum()) / (end - begin) * 1e9


def run(placed: Placed, rules: Rules, waits: Waits | None = None) -> Ran:
    """When each stage computes what: a task as soon as its stage is free and it is ready; backwards first, then the
    lowest subnet, see `CSP`.

    Args:
        waits: who waits for whom; by default as `rules.checks` says.

    Raises:
        InputError: limits for another number of stages.
        DeadlockError: something never ran.
    """
    n, stages, m = len(placed.subnets), placed.stages, rules.microbatches
    held = rules.held or (PLENTY,) * stages
    if len(held) != stages:
        raise InputError(f"limits {held} are for {len(held)} stages, the subnets are on {stages}")
    if waits is None:
        waits = by_version(placed, rules.moving) if rules.checks else nothing(placed)
    machine = STREAM.select(2 * n * stages * m)
    back = placed.backward // m
    weights = back // 2 if rules.split else np.zeros_like(back)
    parts = (placed.forward // m, back - weights, weights)
    times = tuple(machine.copy(each + rules.overhead) for each in parts)
    ran = tuple(machine.fill(n * stages * m) for _ in range(6))
    shape = n, stages, m
    left = machine.run.stream(
        shape,
        (*times, rules.message // m, rules.latency),
        tuple(machine.copy(each) for each in waits),
        (rules.depth, rules.bulk, rules.forwards_first, machine.copy(held), rules.split),
        ran,
    )
    if left:
        raise DeadlockError(f"{left} tasks of {n} subnets never ran: they wait for layers that never come")
    starts_f, ends_f, starts_b, ends_b, starts_w, ends_w = (np.asarray(each).reshape(shape) for each in ran)
    split = np.stack([starts_w, ends_w]) if rules.split else None
    return Ran(placed, rules, np.stack([starts_f, ends_f]), np.stack([starts_b, ends_b]), split)
