"""Planner that moves layers during training to the stages where they take the least time, despite neighbors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf, log2
from statistics import fmean
from typing import ClassVar

import numpy as np

from lightning_pipes.cost import Deployment, ModelProfile
from lightning_pipes.ir import Plan, Program, Schedule, Span
from lightning_pipes.ir.replication import Seconds, list_shares, replicate_plan
from lightning_pipes.planning.planner import BLOCKING, EvenPlanner, Problem, solve_plan
from lightning_pipes.planning.replanning import MAX_OBSERVATIONS, FreeBytes, Interference, Observation
from lightning_pipes.strategies.dynpipe.history import History
from lightning_pipes.strategies.dynpipe.repartition import (
    FULL_SEARCH,
    PartitionChange,
    Search,
    WindowReplay,
    find_partition,
    partitions_of,
    partitions_that_free,
)
from lightning_pipes.strategies.dynpipe.slowdown import SlowdownModel
from lightning_pipes.strategies.dynpipe.work_estimation import estimate_work

OVERLAP_MEMORY_FACTOR = 1.5
"""The multiple of the low mark that has to be free on all devices before batches overlap again."""


@dataclass(frozen=True)
class MemoryGuard:
    """Rule that decides when batches stop overlapping (DynPipe, S V-B2).

    Each batch then runs alone, so that only one batch and no older weights are held. If less than `low` bytes are still
    free after that, layers leave the device. A monitor measures the free memory. Devices whose free memory is unknown
    are not guarded.

    Attributes:
        low: the number of bytes that has to be free on each device. None means no such mark.
        drop: the share of the free memory that may be lost within `every` batches. None means no limit.
    """

    low: int | None = None
    drop: float | None = None

    def should_serialize(self, free: Sequence[FreeBytes], serialized: bool) -> bool:
        """Return whether batches have to run one after another now.

        This ends when all devices have at least `OVERLAP_MEMORY_FACTOR` times the low mark free. Without a low mark, it
        ends when the free memory has not dropped recently.

        Args:
            free: the free bytes before each of the last batches, the oldest first.
            serialized: whether batches run one after another at present.
        """
        now = free[-1]
        if self.short_ranks(now) or any(self._falls(before, now) for before in free):
            return True
        return serialized and not all(each is None or each >= OVERLAP_MEMORY_FACTOR * (self.low or 0) for each in now)

    def short_ranks(self, now: FreeBytes) -> dict[int, float]:
        """Return the number of missing bytes by rank, for devices below the low mark.

        These are the bytes by which the free memory is below `OVERLAP_MEMORY_FACTOR` times the low mark.
        """
        low = self.low or 0
        return {n: OVERLAP_MEMORY_FACTOR * low - each for n, each in enumerate(now) if each is not None and each < low}

    def _falls(self, before: FreeBytes, now: FreeBytes) -> bool:
        if self.drop is None:
            return False
        known = [(a, b) for a, b in zip(before, now, strict=False) if a is not None and b is not None]
        return any(b < (1 - self.drop) * a for a, b in known)


MAX_PENALTY_OBSERVATIONS = 8
"""The number of observations for which a move with a wrong prediction is remembered."""
ERROR_FACTOR = 2.0
"""The multiple of the last move's prediction error that the next move has to save, within `MAX_PENALTY_OBSERVATIONS`
observations."""
MAX_IDLE_OBSERVATIONS = 8
"""The number of observations after which partitions are evaluated even without a change, because times may drift."""
MIN_SLOWDOWN_INCREASE = 1.1
"""The factor by which the slowdown of a device must have increased to count as slower than before."""

_NO_MEMORY_GUARD = MemoryGuard()


@dataclass(frozen=True)
class DynPlanner(EvenPlanner):
    """Planner with even micro-batches, which moves layers during a run if this saves time (DynPipe, S V-B1).

    It uses the duration of every single operation, because medians are 12-13 % too low if a stage is slow from time to
    time. Layers move only if two conditions hold. First, this has to save more than the share `gain` of a step. Second,
    until the end of the run, or in `horizon` batches, it has to save more time than the move takes. Both conditions
    have to hold in each of the last `windows` observations, or on average over more of them if this rule would have
    been better so far (see `history.looks_that_count`). If neighbors come and go, this means that layers soon stay
    where they are. A slowdown that affects all stages equally does not move layers either. If a move did not save the
    predicted time, the next move has to save `ERROR_FACTOR` times the difference for a while, or lead back to the
    earlier plan, because the profile of the layers may be wrong.

    Without a profile of the layers, the times of other partitions are unknown, and layers do not move.

    Attributes:
        every: the number of training batches between two observations.
        windows: the number of consecutive observations in which a move has to save time.
        gain: the minimum share of a step that a move has to save.
        horizon: the number of batches for which conditions are assumed to stay the same.
        search: the limits of the search for other partitions.
        predictor: the predictor of interference. Without it, the planner assumes that all stages are slowed down
            equally on the same device.
        guard: the rule that decides when memory is short.
    """

    every: int = 10
    windows: int = 2
    gain: float = 0.05
    horizon: int = 1000
    search: Search = FULL_SEARCH
    predictor: Interference | None = field(default=None, compare=False)
    guard: MemoryGuard = _NO_MEMORY_GUARD
    wants_profile: ClassVar[bool] = True

    @property
    def guards_memory(self) -> bool:
        return self.guard != _NO_MEMORY_GUARD

    def should_serialize(self, free: Sequence[FreeBytes], serialized: bool) -> bool:
        return self.guard.should_serialize(free, serialized)

    def reduce_memory(self, plan: Plan, problem: Problem, free: FreeBytes) -> Plan | None:
        """Return the fastest plan that frees the missing bytes of all devices, or as many of them as possible."""
        short = self.guard.short_ranks(free)
        looks = [look for look in problem.observations if look.matches_plan(plan)]
        if not short or not looks or problem.profile is None or plan.n_stages < 2 or not plan.layers:
            return None
        if not isinstance(problem.schedule, Schedule):
            return None
        last = replace(looks[-1], free=free, devices=looks[-1].devices or ({},) * len(free))
        windows = self._windows([(plan, last)], problem, problem.schedule.program(plan))
        cuts = partitions_that_free(windows, short, self.guard.low or 0, problem.deployment, problem.tied, self.search)
        change = find_partition(windows, cuts, -inf)
        return None if change is None else replace(plan, layers=change.layers)

    def replan(self, plan: Plan, problem: Problem) -> Plan | None:
        looks = [look for look in problem.observations if look.matches_plan(plan)]
        if problem.profile is None or len(looks) < self.windows or plan.n_stages < 2 or not plan.layers:
            return None
        schedule = problem.schedule
        if not isinstance(schedule, Schedule):  # the order of a policy is known only at run time
            return None
        every = [*_comparable_looks(plan, problem.earlier_observations), *((plan, look) for look in looks)][
            -MAX_OBSERVATIONS:
        ]
        problem = replace(problem, profile=estimate_work(problem.profile, every, self.windows))
        if not self._changed(looks, problem):
            return None
        order = schedule.program(plan)
        windows = self._windows(every[-self.windows :], problem, order)
        reserve = OVERLAP_MEMORY_FACTOR * (self.guard.low or 0)
        cuts = partitions_of(windows, problem.deployment, problem.tied, self.search, reserve)
        if not len(cuts):
            return None
        history = History(windows, cuts, every)
        counted, stay = history.count_windows(self.windows, self.gain)
        last = self._find_last_move(plan, every[: -len(looks)], len(looks), problem, order)
        least = self.gain if last is None else max(self.gain, last.doubt)
        if counted > self.windows and stay != plan.layers:
            windows = self._windows(every[-counted:], problem, order)
        if stay is not None:
            change = None if stay == plan.layers else windows.predict_change(stay)
        else:
            wanted = history.select_length(counted, least)
            change = find_partition(windows, cuts, least) if wanted else None
            if change is not None and last is not None:
                change = last.correct_change(change)
        if change is None or not self._pays(change, plan, problem, order, least):
            change = None if stay is not None else self._find_way_back(windows, plan, problem, order, last)
        return None if change is None else replace(plan, layers=change.layers)

    def _find_way_back(
        self, windows: WindowReplay, plan: Plan, problem: Problem, order: Program, last: _LastMove | None
    ) -> PartitionChange | None:
        """Return the change to the plan before the last move, if it was faster and would be faster again."""
        if last is None or not last.risen:
            return None
        change = last.correct_change(windows.predict_change(last.plan.layers))
        return change if self._pays(change, plan, problem, order, self.gain) else None

    def balance_shares(self, plan: Plan, problem: Problem) -> Seconds | None:
        """Return the seconds of a sample on each rank, by which to divide the samples (DynPipe, S V-B1).

        The result is None if this does not pay. It pays if the slowest stage takes less time by the share `gain` in
        each of the last observations, and if this makes up for a flush. The seconds are limited so that each rank keeps
        about one sample of a batch, and its speed can still be measured.
        """
        looks = [look.replicas for look in problem.observations if look.replicas][-self.windows :]
        if len(looks) < self.windows:
            return None
        tables = [np.array(stage) for stage in zip(*looks, strict=True)]  # axis 0 is looks, axis 1 ranks
        if not all(np.isfinite(table).all() for table in tables):
            return None
        means = [table.mean(axis=0) for table in tables]
        wanted = [np.minimum(each, max(1, problem.rows // len(each)) * each.min()).tolist() for each in means]
        flushes = problem.schedule.flushes
        other = replicate_plan(solve_plan(problem), [len(each) for each in means], wanted, least=int(not flushes))
        old, new = (
            np.max([(table * rows).max(axis=1) for table, rows in zip(tables, list_shares(each), strict=True)], axis=0)
            for each in (plan, other)
        )
        left = self.horizon if problem.remaining is None else min(problem.remaining, self.horizon)
        waits = 0 if flushes else plan.n_stages  # the pipeline has to drain and fill again
        pays = (old - new > self.gain * old) & ((old - new) * left > waits * old)
        return wanted if pays.all() else None

    def _windows(self, looks: Sequence[tuple[Plan, Observation]], problem: Problem, order: Program) -> WindowReplay:
        assert problem.profile is not None
        each = [SlowdownModel(problem.profile, plan, look, problem.deployment, self.predictor) for plan, look in looks]
        return WindowReplay(each, order)

    def _changed(self, looks: Sequence[Observation], problem: Problem) -> bool:
        """Return whether partitions have to be evaluated again.

        This is the case if the time of a stage changed by more than `gain` between the observations, if the number of
        observations is `windows` times a power of two, or after every `MAX_IDLE_OBSERVATIONS` observations. Otherwise,
        the result would be the same as the last one.
        """
        if problem.remaining is not None and problem.remaining // self.every % MAX_IDLE_OBSERVATIONS == 0:
            return True
        if len(looks) < MAX_OBSERVATIONS and log2(len(looks) / self.windows).is_integer():
            return True
        times = np.array([look.stage_seconds for look in looks])
        return bool((times.max(axis=0) > (1 + self.gain) * times.min(axis=0)).any())

    def _pays(self, change: PartitionChange, plan: Plan, problem: Problem, order: Program, least: float) -> bool:
        """Return whether a change pays in each of the last windows.

        If more than the usual number of windows count, the change has to pay on average.
        """
        left = self.horizon if problem.remaining is None else min(problem.remaining, self.horizon)
        assert problem.profile is not None
        waits = travels = move_seconds(problem.profile, plan, change.layers, problem.deployment)
        if problem.relocation == BLOCKING:
            travels = 0.0
        else:  # ranks wait only for the gradients of the last batch during the move
            waits = move_seconds(problem.profile, plan, change.layers, problem.deployment, ("gradients",))
        if order.is_endless:  # the pipeline has to drain and fill again
            waits += plan.n_stages * max(change.old) / len(plan.jobs[0].forward[0])

        def is_worthwhile(old: float, new: float) -> bool:
            return old - new > least * old and (old - new) * (left - travels / old) > waits

        if len(change.old) > self.windows:
            return is_worthwhile(fmean(change.old), fmean(change.new))
        return all(map(is_worthwhile, change.old, change.new))

    def _find_last_move(
        self, plan: Plan, earlier: Sequence[tuple[Plan, Observation]], looks: int, problem: Problem, order: Program
    ) -> _LastMove | None:
        """Return the last move of layers, or None, by the last window of the plan before it."""
        if not earlier or earlier[-1][0].layers == plan.layers:
            return None
        windows, then = (
            self._windows([last], problem, order) for last in ((plan, problem.observations[-1]), earlier[-1])
        )
        was = then.now.plan
        (promised,) = then.predict_change(plan.layers).new
        stages = zip(windows.now.stage_slowdowns(), then.now.stage_slowdowns(), plan.layers, was.layers, strict=True)
        got = [
            now > MIN_SLOWDOWN_INCREASE * old
            for now, old, has, had in stages
            if has.start < had.start or has.stop > had.stop
        ]
        doubt = 0.0
        if any(got) and looks <= MAX_PENALTY_OBSERVATIONS:
            doubt = ERROR_FACTOR * max(0.0, windows.old[-1] - promised) / windows.old[-1]
        return _LastMove(was, then.old[0], doubt, any(got))


@dataclass(frozen=True)
class _LastMove:
    """The last move of layers.

    Attributes:
        plan: the plan before the move.
        seconds: the seconds of a step of this plan in its last window.
        doubt: the share of a step by which the prediction of the move was wrong, multiplied by `ERROR_FACTOR`.
        risen: whether a device that received layers is slower now than before the move. If so, the layers may be slower
            than their profile.
    """

    plan: Plan
    seconds: float
    doubt: float
    risen: bool

    def correct_change(self, change: PartitionChange) -> PartitionChange:
        """Return the change with the measured seconds of the earlier plan, if it leads back to this plan.

        The predicted seconds are kept if `risen` is false, or if they are higher.
        """
        if not self.risen or change.layers != self.plan.layers:
            return change
        return replace(change, new=tuple(max(each, self.seconds) for each in change.new))


def _comparable_looks(plan: Plan, before: Sequence[tuple[Plan, Observation]]) -> Iterator[tuple[Plan, Observation]]:
    """Yield the observations of earlier plans that have the jobs and the ranks of `plan`."""
    for earlier, look in before:
        if look.matches_plan(earlier) and (earlier.jobs, earlier.ranks) == (plan.jobs, plan.ranks):
            yield earlier, look


def move_seconds(
    profile: ModelProfile,
    plan: Plan,
    layers: Sequence[Span],
    deployment: Deployment | None = None,
    what: Sequence[str] = ("weights", "optimizer"),
) -> float:
    """Return the seconds until all moving layers have arrived. The links transfer at the same time.

    Args:
        profile: the bytes of each layer.
        plan: the current plan.
        layers: the layers of each stage after the move.
        deployment: the links. If it is None, the result is 0.
        what: the data of a layer that is sent, by default the weights and the optimizer states.
    """
    size = np.sum([profile.layer_arrays.layer_values(name) for name in what], axis=0)
    before, after = ([s for s, span in enumerate(each) for _ in range(span.rows)] for each in (plan.layers, layers))
    taken: dict[tuple[int, int], float] = {}
    for layer, (a, b) in enumerate(zip(before, after, strict=True)):
        pair = plan.ranks[a], plan.ranks[b]
        if pair[0] != pair[1]:
            taken[pair] = taken.get(pair, 0.0) + float(size[layer])
    if deployment is None:
        return 0.0
    cluster = deployment.pipeline
    return max(
        (cluster.link_between(*p).message_seconds(n) for p, n in taken.items()),
        default=0.0,
    )
