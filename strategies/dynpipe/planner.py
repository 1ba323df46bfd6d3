"""Layers move while training goes on, to where they take least time beside neighbours."""

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
from lightning_pipes.strategies.dynpipe.interference.refit import LearningPredictor
from lightning_pipes.strategies.dynpipe.repartition import (
    WHOLE,
    PartitionChange,
    Search,
    WindowReplay,
    find_partition,
    partitions_of,
    partitions_that_free,
)
from lightning_pipes.strategies.dynpipe.situation import Situation
from lightning_pipes.strategies.dynpipe.work import estimate_work

RELIEF = 1.5
"""Batches overlap again when all devices have this many times the low mark free."""


@dataclass(frozen=True)
class MemoryGuard:
    """When batches stop overlapping (DynPipe, S V-B2): each then runs alone, so that one is held and no older weights
    are. Where that leaves less than `low` free, layers leave the device. What is free is seen by a monitor; where
    is unknown, nothing is guarded.

    Attributes:
        low: bytes of which more has to be free on each device; None for no such mark.
        drop: the share of what is free that may go within `every` batches; None for any.
    """

    low: int | None = None
    drop: float | None = None

    def should_serialize(self, free: Sequence[FreeBytes], serialized: bool) -> bool:
        """Return whether batches run one by one now, by the free bytes before the last batches, the oldest first.

        It ends when all are above RELIEF times the low mark; without one, when nothing has fallen lately."""
        now = free[-1]
        if self.short_ranks(now) or any(self._falls(before, now) for before in free):
            return True
        return serialized and not all(each is None or each >= RELIEF * (self.low or 0) for each in now)

    def short_ranks(self, now: FreeBytes) -> dict[int, float]:
        """Return the bytes that devices lack, by rank."""
        low = self.low or 0
        return {n: RELIEF * low - each for n, each in enumerate(now) if each is not None and each < low}

    def _falls(self, before: FreeBytes, now: FreeBytes) -> bool:
        if self.drop is None:
            return False
        known = [(a, b) for a, b in zip(before, now, strict=False) if a is not None and b is not None]
        return any(b < (1 - self.drop) * a for a, b in known)


PATIENT = 8
"""Looks for which a re-plan that was wrong is remembered."""
DOUBT = 2.0
"""A re-plan must promise this many times what the last one was wrong by, as long as there are PATIENT looks at most."""
ANYWAY = 8
"""Every so many looks all is weighed even if no stage takes another time than before: times may drift."""
RISEN = 1.1
"""By what factor a device takes longer that counts as slower than before."""

_UNGUARDED = MemoryGuard()


@dataclass(frozen=True)
class DynPlanner(EvenPlanner):
    """Even micro-batches; and layers that move where that pays, by what is seen of a run (DynPipe, S V-B1).

    It plans on every operation's own duration, as medians are too low by 12-13 % where one stage is slow now and then.
    Layers move only if that saves more than the share `gain` of a step, and more until the run ends, or for `horizon`
    batches, than moving takes; and if this was so in each of the last `windows` looks, or on the average of more of
    them where that would have served better so far (`select_history_length`): where neighbours come and go layers soon
    stay. Nor does what slows all stages alike move any. After a move that did not bring what it promised the next one
    must promise DOUBT times the difference, for a while, or lead back: layers may not take what their profile says.

    Without a profile of the layers nothing is known of other partitions, and nothing moves.

    Attributes:
        every: training batches from one look to the next.
        predictor: of interference; None takes stages that would suffer otherwise than the present ones to suffer as
            much.
        guard: says when memory gets short.
    """

    every: int = 10
    windows: int = 2
    gain: float = 0.05
    horizon: int = 1000
    search: Search = WHOLE
    predictor: Interference | None = field(default=None, compare=False)
    guard: MemoryGuard = _UNGUARDED
    wants_profile: ClassVar[bool] = True

    @property
    def guards_memory(self) -> bool:
        return self.guard != _UNGUARDED

    def should_serialize(self, free: Sequence[FreeBytes], serialized: bool) -> bool:
        return self.guard.should_serialize(free, serialized)

    def reduce_memory(self, plan: Plan, problem: Problem, free: FreeBytes) -> Plan | None:
        """Return the fastest plan that frees the bytes which devices lack, or as many of them as possible."""
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
        if not isinstance(schedule, Schedule):  # a policy that orders while it runs can't be simulated in advance
            return None
        every = [*_comparable_looks(plan, problem.earlier_observations), *((plan, look) for look in looks)][
            -MAX_OBSERVATIONS:
        ]
        problem = replace(problem, profile=estimate_work(problem.profile, every, self.windows))
        self._teach_predictor(plan, looks[-1], problem)
        if not self._changed(looks, problem):
            return None
        order = schedule.program(plan)
        windows = self._windows(every[-self.windows :], problem, order)
        reserve = RELIEF * (self.guard.low or 0)
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

    def _teach_predictor(self, plan: Plan, look: Observation, problem: Problem) -> None:
        """Have a predictor that goes on learning see the last look."""
        if isinstance(self.predictor, LearningPredictor):
            assert problem.profile is not None
            self.predictor.observe(*Situation(problem.profile, plan, look, problem.deployment).feature_rows())

    def _find_way_back(
        self, windows: WindowReplay, plan: Plan, problem: Problem, order: Program, last: _LastMove | None
    ) -> PartitionChange | None:
        """Return the change to the plan before the last move, if that was faster, and would be again."""
        if last is None or not last.risen:
            return None
        change = last.correct_change(windows.predict_change(last.plan.layers))
        return change if self._pays(change, plan, problem, order, self.gain) else None

    def balance_shares(self, plan: Plan, problem: Problem) -> Seconds | None:
        """Return the seconds of a sample on each rank, where shares by them pay (DynPipe, S V-B1).

        They pay if the slowest stage takes less by the share `gain` in each of the last looks, and a flush is made up
        for. Each rank keeps a sample of a batch, so that its speed is seen.
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
        waits = 0 if flushes else plan.n_stages  # it has to run dry, and to fill again
        pays = (old - new > self.gain * old) & ((old - new) * left > waits * old)
        return wanted if pays.all() else None

    def _windows(self, looks: Sequence[tuple[Plan, Observation]], problem: Problem, order: Program) -> WindowReplay:
        assert problem.profile is not None
        each = [Situation(problem.profile, plan, look, problem.deployment, self.predictor) for plan, look in looks]
        return WindowReplay(each, order)

    def _changed(self, looks: Sequence[Observation], problem: Problem) -> bool:
        """Return whether some stage takes another time than in a look before, by a share that could matter, or there
        are twice as many looks as when the answer was another time; else the answer is that of the last look."""
        if problem.remaining is not None and problem.remaining // self.every % ANYWAY == 0:
            return True
        if len(looks) < MAX_OBSERVATIONS and log2(len(looks) / self.windows).is_integer():
            return True
        times = np.array([look.stage_seconds for look in looks])
        return bool((times.max(axis=0) > (1 + self.gain) * times.min(axis=0)).any())

    def _pays(self, change: PartitionChange, plan: Plan, problem: Problem, order: Program, least: float) -> bool:
        """Return whether it does in each of the last windows; where more than the usual number count, on their
        average."""
        left = self.horizon if problem.remaining is None else min(problem.remaining, self.horizon)
        assert problem.profile is not None
        waits = travels = move_seconds(problem.profile, plan, change.layers, problem.deployment)
        if problem.relocation == BLOCKING:
            travels = 0.0
        else:  # only for the gradients of the last batch that ran meanwhile
            waits = move_seconds(problem.profile, plan, change.layers, problem.deployment, ("gradients",))
        if order.is_endless:  # it has to run dry, and to fill again
            waits += plan.n_stages * max(change.old) / len(plan.jobs[0].forward[0])

        def is_worthwhile(old: float, new: float) -> bool:
            return old - new > least * old and (old - new) * (left - travels / old) > waits

        if len(change.old) > self.windows:
            return is_worthwhile(fmean(change.old), fmean(change.new))
        return all(map(is_worthwhile, change.old, change.new))

    def _find_last_move(
        self, plan: Plan, earlier: Sequence[tuple[Plan, Observation]], looks: int, problem: Problem, order: Program
    ) -> _LastMove | None:
        """Return the last move, where it was one, by the last window of the plan before it."""
        if not earlier or earlier[-1][0].layers == plan.layers:
            return None
        windows, then = (
            self._windows([last], problem, order) for last in ((plan, problem.observations[-1]), earlier[-1])
        )
        was = then.now.plan
        (promised,) = then.predict_change(plan.layers).new
        stages = zip(windows.now.stage_slowdowns(), then.now.stage_slowdowns(), plan.layers, was.layers, strict=True)
        got = [now > RISEN * old for now, old, has, had in stages if has.start < had.start or has.stop > had.stop]
        doubt = 0.0
        if any(got) and looks <= PATIENT:
            doubt = DOUBT * max(0.0, windows.old[-1] - promised) / windows.old[-1]
        return _LastMove(was, then.old[0], doubt, any(got))


@dataclass(frozen=True)
class _LastMove:
    """The last move of layers.

    Attributes:
        plan: before it.
        seconds: of that plan's steps, in its last window.
        doubt: the share of a step by which the re-plan was wrong, times DOUBT.
        risen: some device to which layers went is slower now than then: maybe they are slower than is known.
    """

    plan: Plan
    seconds: float
    doubt: float
    risen: bool

    def correct_change(self, change: PartitionChange) -> PartitionChange:
        """Return the same with what this plan took, where it is to come back, if layers may be slower than is known."""
        if not self.risen or change.layers != self.plan.layers:
            return change
        return replace(change, new=tuple(max(each, self.seconds) for each in change.new))


def _comparable_looks(plan: Plan, before: Sequence[tuple[Plan, Observation]]) -> Iterator[tuple[Plan, Observation]]:
    """Yield the looks at earlier plans that have the jobs and the ranks of `plan`."""
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
    """Return seconds until the layers that have to are elsewhere: the bytes of `what` they have, by default their
    weights and what optimizers remember of them, on the links that they take, which work side by side."""
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
