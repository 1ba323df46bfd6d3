"""A stream of subnets in virtual time, with the times at which each stage computes under the rules of a system."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from benchmarks.papers.csp.emulation.kernel import STREAM
from benchmarks.papers.csp.emulation.spaces import Array, Placed
from lightning_pipes.ir import DeadlockError, InputError, check_count, check_fields, short_repr

PLENTY = 1 << 40
"""A number of micro-batches that no stage reaches."""
FIXED = 200_000
"""Nanoseconds of a task in addition to its share of the batch.

They represent the launch of kernels and the overhead of the engine.
"""


@dataclass(frozen=True)
class Rules:
    """The rules of a system.

    Attributes:
        microbatches: the number of micro-batches. Each one takes its share of the batch's time and `overhead`.
        depth: the number of subnets from the oldest to the newest one in progress, on each stage.
        checks: whether a forward waits until earlier subnets have updated its layers.
        bulk: the number of subnets between two flushes, or 0 for a system without flushes.
        forwards_first: whether a stage runs all forwards of a bulk before its backwards.
        held: the number of micro-batches that each stage may hold between forward and backward, or None for no limit.
        overhead: additional nanoseconds of each task.
        message: nanoseconds for which the message of a whole batch occupies a link.
        latency: additional nanoseconds until a message arrives.
        moving: the time until an update reaches another stage, as a multiple of the layer's swap time.
        split: whether the backward has two parts, each with half of its time and the whole `overhead`: input gradients,
            which are sent immediately, and weight gradients, see `CSP.split_backward`.

    Raises:
        InputError: a number is less than its minimum.
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
            raise InputError("forwards_first is for bulks; set bulk to the number of subnets in a bulk")


class Waits(NamedTuple):
    """Dependencies between subnets on stages, numbered by subnet and stage as in `kernel`.

    Attributes:
        missing: for each number, the number of layer updates that it waits for.
        first: for each number, the position of its updates in `target`.
        target: the numbers that receive the updates.
        delay: nanoseconds until each update arrives.
    """

    missing: Array
    first: Array
    target: Array
    delay: Array

    @classmethod
    def of(cls, sources: Array, targets: Array, delays: Array, numbers: int) -> Waits:
        """Return dependencies from arrays with one entry for each of them: its source, its target and its delay."""
        order = np.argsort(sources, kind="stable")
        first = np.zeros(numbers + 1, np.int64)
        np.cumsum(np.bincount(sources, minlength=numbers), out=first[1:])
        return cls(np.bincount(targets, minlength=numbers), first, targets[order], delays[order])


def by_version(placed: Placed, moving: int) -> Waits:
    """Return dependencies that keep the order of reads and writes of each layer.

    A forward waits until each of its layers has the update of the last earlier subnet that uses it, on any stage (S2.1,
    Definition 2). The printed rule, which uses a list of finished subnets for each stage, is unsound if layers move
    between stages.
    """
    subnets, stages = placed.subnets, placed.stages
    users, blocks = np.nonzero(subnets.next_user >= 0)
    later = subnets.next_user[users, blocks]
    here, there = placed.stage_of[users, blocks], placed.stage_of[later, blocks]
    delays = np.where(here == there, 0, moving * subnets.swap[users, blocks])
    return Waits.of(users * stages + here, later * stages + there, delays, len(subnets) * stages)


def nothing(placed: Placed) -> Waits:
    """Return no dependencies."""
    none = np.zeros(0, np.int64)
    return Waits.of(none, none, none, len(placed.subnets) * placed.stages)


@dataclass(frozen=True, eq=False)
class Ran:
    """The times of all tasks of a stream, in nanoseconds, by subnet, stage and micro-batch.

    Attributes:
        placed: the subnets with the stage of each block.
        rules: the rules of the system.
        forwards: starts and ends of forwards, in axis 0.
        backwards: starts and ends of backwards. If backwards are split, these are the times of the input gradients.
        weights: starts and ends of the weight gradients, or None if backwards are not split.
    """

    placed: Placed
    rules: Rules
    forwards: Array
    backwards: Array
    weights: Array | None = None

    @property
    def tasks(self) -> tuple[Array, ...]:
        """The starts and ends of each kind of task."""
        return (self.forwards, self.backwards, *([] if self.weights is None else [self.weights]))

    @cached_property
    def stepped(self) -> Array:
        """The time at which the layers of each subnet are updated, by subnet and stage."""
        return np.asarray(self.tasks[-1][1].max(axis=2))

    @cached_property
    def makespan(self) -> int:
        """The time at which the last task ends."""
        return int(self.stepped.max(initial=0))

    @cached_property
    def steady(self) -> tuple[int, int]:
        """The start and the end of the steady state.

        It begins when the first tenth of the subnets has left stage 0. It ends when stage 0 has less than a whole
        `depth`, or less than a bulk, of subnets left.
        """
        ends = np.sort(self.stepped[:, 0])
        n = len(ends)
        left = self.rules.bulk or min(self.rules.depth, n // 3)
        whole = max(1, self.rules.bulk)  # between two bulks, if the system has bulks
        begin, end = -(-(n // 10) // whole) * whole, max(n - left, 1) // whole * whole
        if begin >= end:
            return 0, self.makespan
        return (int(ends[begin - 1]) if begin else 0), int(ends[end - 1])

    def busy(self, begin: int, end: int) -> Array:
        """Return the nanoseconds for which each stage computes between two times."""
        total = np.zeros(self.placed.stages, np.int64)
        for starts, ends in self.tasks:
            total += (np.minimum(ends, end) - np.maximum(starts, begin)).clip(0).sum(axis=(0, 2))
        return total

    @property
    def bubble(self) -> float:
        """The share of the steady state for which stages idle, from 0 to 1."""
        begin, end = self.steady
        return 1 - float(self.busy(begin, end).sum()) / (self.placed.stages * (end - begin))

    @property
    def lost(self) -> float:
        """The same share if the tasks' `overhead` also counts as idle time."""
        begin, end = self.steady
        return 1 - self.useful(begin, end) / (self.placed.stages * (end - begin))

    def useful(self, begin: int, end: int) -> float:
        """Return the nanoseconds of `busy` of all stages together, without the tasks' `overhead`."""
        total = 0.0
        for starts, ends in self.tasks:
            inside = (np.minimum(ends, end) - np.maximum(starts, begin)).clip(0)
            lengths = np.maximum(ends - starts, 1)
            total += float((inside * (1 - self.rules.overhead / lengths)).sum())
        return total

    @property
    def throughput(self) -> float:
        """The number of subnets per second that leave stage 0 in the steady state."""
        begin, end = self.steady
        over = self.stepped[:, 0]
        return float(((over > begin) & (over <= end)).sum()) / (end - begin) * 1e9


def run(placed: Placed, rules: Rules, waits: Waits | None = None) -> Ran:
    """Emulate a stream and return the times of its tasks.

    A stage starts a ready task as soon as it is free. Backwards have priority, followed by the subnet with the lowest
    number, see `CSP`.

    Args:
        placed: the subnets with the stage of each block.
        rules: the rules of the system.
        waits: the dependencies. By default, they follow from `rules.checks`.

    Raises:
        InputError: `rules.held` is for another number of stages.
        DeadlockError: some tasks never ran.
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
        raise DeadlockError(f"{left} tasks of {n} subnets never ran: they wait for layers that never arrive")
    starts_f, ends_f, starts_b, ends_b, starts_w, ends_w = (np.asarray(each).reshape(shape) for each in ran)
    split = np.stack([starts_w, ends_w]) if rules.split else None
    return Ran(placed, rules, np.stack([starts_f, ends_f]), np.stack([starts_b, ends_b]), split)
