"""Observations of the last batches on all ranks, for planners.

If batches overlap, no rank waits for an observation:

    batch 50    every rank publishes its statistics since the last observation, a few numbers in the store
    batch 54    all ranks have published; every rank reads the statistics of all ranks, and calls its planner
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf, isinf, isnan, nan
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple, Protocol

import lightning.pytorch as pl
import numpy as np
import numpy.typing as npt

from lightning_pipes.engine.engine import Engine
from lightning_pipes.ir import COMPUTE_KINDS, Kind, LayerUse, Plan, Program
from lightning_pipes.ir.instruction import NO_SPAN
from lightning_pipes.planning.measured import WINDOW_STEPS, Averages, StepSample
from lightning_pipes.planning.replanning import MAX_OBSERVATIONS, FreeBytes, Observation
from lightning_pipes.sim import Event
from lightning_pipes.sim.records.training_record import Curves
from lightning_pipes.trainer.plan.plans import Plans
from lightning_pipes.trainer.ranks.holdings import positions_of_ranks
from lightning_pipes.trainer.ranks.notices import Notices
from lightning_pipes.trainer.ranks.ranks import Ranks
from lightning_pipes.trainer.reports.report import Window

Array = npt.NDArray[np.float64]
MAX_KEPT_WINDOWS = 64
"""The largest number of windows that a rank keeps from one observation to the next."""
N_AVERAGED_WINDOWS = WINDOW_STEPS + 2
"""The number of windows that averages use.

The first window only determines when the next one begins. In the next one, the times of work that is done only once
still count.
"""


class DeviceMonitor(Protocol):
    """Monitors the device of this rank."""

    def since_last(self) -> tuple[Mapping[str, float], int | None]:
        """Return the means of all metrics since the last call, and the free bytes of the device.

        A mean is NaN if its metric has no samples. The free bytes are None if they are unknown.
        """

    def free_bytes(self) -> int | None:
        """Return the free bytes of the device at the last sample, or None."""

    def to_curves(self) -> Curves:
        """Return all samples over time."""


class RankStatistics(NamedTuple):
    """The part of one rank in an observation.

    Attributes:
        samples: one sample for each of the rank's last windows, except the first.
        operations: seconds of the computations of the rank's own stages, as in `Observation`.
        device: means of the device's metrics, by name.
        free: free bytes of the device, or None.
        layers: mean seconds per sample of the rank's own layers, as in `Observation`.
    """

    samples: list[StepSample]
    operations: dict[tuple[Kind, int], Array]
    device: Mapping[str, float]
    free: int | None
    layers: Mapping[int, float] = MappingProxyType({})


class StepStatistics:
    """Observations of the running plan by all ranks.

    Collective: all ranks create one and make the same calls after the same batch.

    Args:
        ranks: the ranks of the job.

    Attributes:
        monitor: the monitor of this rank's device, or None if there is none.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._windows: deque[Window] = deque(maxlen=MAX_KEPT_WINDOWS)
        self._seen: deque[Observation] = deque(maxlen=MAX_OBSERVATIONS)
        self._plan: Plan | None = None
        self._layers: dict[int, tuple[float, int]] = {}
        self.monitor: DeviceMonitor | None = None

    def add(self, window: Window) -> None:
        """Add a window of this rank."""
        self._windows.append(window)

    def observe_plan(self, plan: Plan) -> tuple[Observation, ...]:
        """Return all observations of `plan`, the oldest first.

        A new observation is made if at least two windows of `plan` have been added since the last one. A call for a
        plan that has not run keeps all windows for the next call. This happens for a plan of the short last batch of an
        epoch.
        """
        own = [window for window in self._windows if window.plan is plan]
        if len(own) < 2:
            return self.recall_plan(plan)
        self._windows.clear()
        return self.merge_observations(self._ranks.control.all_gather(self.own_statistics(own)), plan)

    def recall_plan(self, plan: Plan) -> tuple[Observation, ...]:
        """Return the existing observations of `plan`, the oldest first. Not collective."""
        return tuple(self._seen) if plan is self._plan else ()

    def own_free_bytes(self) -> int | None:
        """Return the free bytes of this rank's device. Not collective."""
        return None if self.monitor is None else self.monitor.free_bytes()

    def gather_free_bytes(self, plan: Plan) -> FreeBytes:
        """Return the free bytes of the devices in the order of the ranks of `plan`. Collective."""
        return self.merge_free_bytes(self._ranks.control.all_gather(self.own_free_bytes()), plan)

    def merge_free_bytes(self, free: Sequence[int | None], plan: Plan) -> FreeBytes:
        """Return the smallest number of free bytes over all replicas, in the order of the ranks of `plan`.

        Args:
            free: the free bytes on each global rank.
            plan: the plan.
        """
        pipelines = self._ranks.grid.pipelines
        order = positions_of_ranks(plan.ranks, len(pipelines[0]))
        return tuple(
            min((each for pipeline in pipelines if (each := free[pipeline[at]]) is not None), default=None)
            for at in order
        )

    def own_statistics(self, own: Sequence[Window]) -> RankStatistics:
        """Return this rank's part of an observation, given its windows of the plan. Not collective."""
        device, free = ({}, None) if self.monitor is None else self.monitor.since_last()
        layers = {number: seconds / rows for number, (seconds, rows) in self._layers.items()}
        self._layers.clear()
        samples = [sample_of(*pair) for pair in pairwise(own[-N_AVERAGED_WINDOWS:])]
        return RankStatistics(samples, operations_of(own), device, free, layers)

    def add_layer(self, number: int, rows: int, seconds: float) -> None:
        """Add the seconds of a forward of `rows` samples through a layer of this rank."""
        before, samples = self._layers.get(number, (0.0, 0))
        self._layers[number] = before + seconds, samples + rows

    def merge_observations(self, of_ranks: Sequence[RankStatistics], plan: Plan) -> tuple[Observation, ...]:
        """Return all observations of `plan`, including a new one from the parts of all ranks."""
        if plan is not self._plan:
            self._plan = plan
            self._seen.clear()
        found = merge_statistics(of_ranks, self._ranks.grid.pipelines, plan)
        if found is not None:
            self._seen.append(found)
        return tuple(self._seen)


def merge_statistics(
    of_ranks: Sequence[RankStatistics], pipelines: Sequence[Sequence[int]], plan: Plan
) -> Observation | None:
    """Merge the parts of all ranks to an observation, or return None if a rank has fewer than two windows.

    The slowest replica determines each time, because replicas wait for each other at every step. If batches overlap,
    ranks are at different batches. In this case, the last batches of each rank are used, and their number is the
    smallest number on any rank.

    Args:
        of_ranks: the parts of all processes, by global rank.
        pipelines: the global ranks of every replica.
        plan: the plan that was running.
    """
    positions = positions_of_ranks(plan.ranks, len(pipelines[0]))
    groups = [[positions[r] for r in ranks] for ranks in plan.replicas] or [[at] for at in positions]
    alike = [[of_ranks[pipeline[at]] for pipeline in pipelines for at in places] for places in groups]
    averages = Averages()
    steps = min(len(part.samples) for part in of_ranks)
    if not steps:
        return None
    for n in range(-steps, 0):
        averages.add(_slowest([part.samples[n] for part in same]) for same in alike)
    batches = min((len(table) for part in of_ranks for table in part.operations.values()), default=0)
    operations = {
        key: np.fmax.reduce([part.operations[key][len(part.operations[key]) - batches :] for part in same])
        for same in alike
        for key in same[0].operations
    }
    free = tuple(min((s.free for s in same if s.free is not None), default=None) for same in alike)
    layers = {number: max(part.layers.get(number, 0.0) for part in same) for same in alike for number in same[0].layers}
    devices = tuple(_mean([s.device for s in same]) for same in alike)
    several = enumerate(alike if plan.replicas else ())
    replicas = [[_sample_seconds(part, plan, stage) for part in same] for stage, same in several]
    return Observation(averages.costs(), operations, devices, free, layers, replicas)


def _sample_seconds(part: RankStatistics, plan: Plan, stage: int) -> float:
    """Return a rank's mean seconds per sample of a forward and backward on a stage, or NaN if it had no samples."""
    total = 0.0
    for kind in plan.kinds_of_stage(stage):
        table, rows = part.operations[kind, stage], [span.rows for span in plan.spans(kind, stage)]
        samples = (np.isfinite(table) * rows).sum()
        if kind is not Kind.R:
            total += float(np.nansum(table) / samples) if samples else nan
        elif samples:
            total += plan.recomputed_share(stage) * float(np.nansum(table) / samples)
    return total


def operations_of(windows: Sequence[Window]) -> dict[tuple[Kind, int], Array]:
    """Return the seconds of every computation in windows of one plan, in the form of `Observation`."""
    batches = [max((e.instruction.batch for e in w.events), default=-1) + 1 for w in windows]
    found: dict[tuple[Kind, int], Array] = {}
    columns: dict[tuple[Kind, int], dict[object, int]] = {}
    for first, window in zip(np.cumsum([0, *batches]).tolist(), windows, strict=False):
        for _, (kind, stage, job, batch, span), start, end in window.events:
            if kind not in COMPUTE_KINDS or job:
                continue
            key = kind, stage
            if key not in found:
                spans = window.plan.spans(kind, stage) or (NO_SPAN,)
                columns[key] = {span: n for n, span in enumerate(spans)}
                found[key] = np.full((sum(batches), len(spans)), np.nan)
            column = 0 if kind is Kind.STEP else columns[key][span]  # the span of a STEP names its replica
            found[key][first + batch, column] = (end - start) / 1e9
    return found


def sample_of(before: Window, window: Window) -> StepSample:
    """Return a sample of `window` on this rank, given the window `before` it."""
    ended = max((e.end for e in before.events if e.instruction.kind in (Kind.B, Kind.I)), default=0)
    return StepSample.from_events(window.events, window.plan, ended, chosen=not isinstance(window.order, Program))


def _slowest(samples: Sequence[StepSample]) -> StepSample:
    """Return the first of the samples that one rank has in all replicas, with the longest means over all of them."""
    means = dict(samples[0].means)
    for sample in samples[1:]:
        means |= {key: max(mean, means.get(key, mean)) for key, mean in sample.means.items()}
    return samples[0]._replace(means=means)


def _mean(devices: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the means by name, ignoring NaN."""
    names = dict.fromkeys(name for device in devices for name in device)
    known = {name: [d[name] for d in devices if name in d and not isnan(d[name])] for name in names}
    return {name: fmean(values) if values else float("nan") for name, values in known.items()}


def batches_left(trainer: pl.Trainer) -> int | None:
    """Return the number of batches until a limit of the Trainer ends the run, including the current one.

    The result is None if there is no limit.
    """
    limits: list[float] = []
    if trainer.max_steps > -1:
        limits.append((trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches)
    if trainer.max_epochs is not None and trainer.max_epochs > -1:
        whole = (trainer.max_epochs - trainer.current_epoch) * trainer.num_training_batches
        limits.append(whole - trainer.fit_loop.batch_idx)
    least = min(limits, default=inf)
    return None if isinf(least) else max(0, int(least))


MAX_PREDICTED_BATCHES = 50
"""The number of recorded batches in a window that a policy orders.

Predicting thousands of batches with the policy takes minutes.
"""


class WindowRecorder:
    """Records the batches since the last flush."""

    def __init__(self) -> None:
        self._batches = 0
        self._uses: deque[LayerUse] = deque(maxlen=MAX_PREDICTED_BATCHES)
        self._programs: dict[tuple[Plan, int], Program] = {}

    def add(self, use: LayerUse) -> None:
        """Add a batch that uses these layers."""
        self._batches += 1
        self._uses.append(use)

    def last_window(self, engine: Engine, plans: Plans) -> Window:
        """Return the window of this rank's last batches, which are numbered from 0, in the order of `plans`."""
        plan, batches, uses = engine.plan, self._batches, tuple(self._uses)
        self._batches = 0
        self._uses.clear()
        order = plans.for_rows(plan.jobs[0].rows)[1]
        if isinstance(order, Program):
            if (plan, batches) not in self._programs:
                self._programs[plan, batches] = order.unroll(batches)
            return Window(plan, self._programs[plan, batches], engine.events)
        first = batches - len(uses)
        events = [
            e._replace(instruction=e.instruction._replace(batch=e.instruction.batch - first))
            for e in engine.events
            if e.instruction.batch >= first
        ]
        return Window(plan, order, events, uses)


class AsynchronousStatistics:
    """Observations of overlapping batches, one observation at a time.

    Collective: all ranks create one and make the same calls for the same batches.

    Args:
        statistics: collects the observations.
        notices: the messages with which ranks exchange their statistics.
        ranks: the global ranks of all replicas.
        rank: the global rank of this process.
        max_lag: the largest number of batches between two ranks.
    """

    def __init__(
        self, statistics: StepStatistics, notices: Notices, ranks: Sequence[int], rank: int, max_lag: int
    ) -> None:
        self._statistics, self._notices, self._ranks, self._rank, self._max_lag = (
            statistics,
            notices,
            ranks,
            rank,
            max_lag,
        )
        self._begun: tuple[int, Plan, RankStatistics] | None = None
        self._left: deque[int] = deque()  # batches of observations whose notices still exist
        self._counted_batches: deque[int] = deque()  # batches before which free bytes were published
        self._ended: list[Window] = []
        self._from = 0  # earlier events belong to previous observations

    def add_window(self, window: Window) -> None:
        """Add a window that a flush has ended on this rank. Only events since the last observation are used."""
        events = complete_events(window.events, self._from)
        if events:
            self._ended.append(replace(window, events=events))

    @property
    def is_pending(self) -> bool:
        """Whether an observation is waiting for other ranks."""
        return self._begun is not None

    def drop_observation(self) -> None:
        """Drop the pending observation."""
        self._begun = None

    def start_observation(self, batch: int, window: Window) -> None:
        """Publish this rank's part of an observation, before batch number `batch`. No observation may be pending.

        Args:
            batch: the number of the next batch.
            window: the current window, which continues.
        """
        plan = window.plan
        self.add_window(window)
        self._from = max((e.end for each in (*self._ended, window) for e in each.events), default=self._from)
        first = replace(window, events=[])  # a sample needs the window before it
        part = self._statistics.own_statistics([first, *(each for each in self._ended if each.plan is plan)])
        self._ended.clear()
        # All ranks have begun the next observation, so all of them have read this one.
        while len(self._left) > 1 and self._left[1] <= batch - self._max_lag:
            self._notices.remove(self._name(self._left.popleft(), self._rank))
        self._left.append(batch)
        self._notices.put(self._name(batch, self._rank), part)
        self._begun = batch, plan, part

    def collect_observations(self, batch: int, rows: int, flushed: bool) -> tuple[Observation, ...] | None:
        """Return the observations of the plan for `rows` samples, before batch number `batch`.

        The result is None if there is no new observation.

        Args:
            batch: the number of the next batch.
            rows: number of samples in the batch.
            flushed: whether all ranks are at this batch.
        """
        if self._begun is None or self._begun[1].jobs[0].rows != rows:
            return None
        begun, plan, mine = self._begun
        if not flushed and batch - begun <= self._max_lag:
            return None
        self._begun = None
        of_ranks = [mine if r == self._rank else self._notices.get(self._name(begun, r)) for r in self._ranks]
        return self._statistics.merge_observations(of_ranks, plan)

    def collect_free_bytes(self, batch: int, plan: Plan) -> FreeBytes | None:
        """Exchange free bytes before batch number `batch`, and return the free bytes of each device of `plan`.

        The values are from about `max_lag` batches before. The result is None until all ranks are guaranteed to have
        published their values.
        """
        self._counted_batches.append(batch)
        self._notices.put(f"free/{batch}/{self._rank}", self._statistics.own_free_bytes())
        while self._counted_batches[0] < batch - 2 * self._max_lag - 1:
            self._notices.remove(f"free/{self._counted_batches.popleft()}/{self._rank}")
        then = batch - self._max_lag - 1
        if then not in self._counted_batches:
            return None
        return self._statistics.merge_free_bytes([self._notices.get(f"free/{then}/{r}") for r in self._ranks], plan)

    @staticmethod
    def _name(batch: int, rank: int) -> str:
        return f"look/{batch}/{rank}"


def complete_events(events: Sequence[Event], since: int) -> list[Event]:
    """Return the events of batches that began and ended after the time `since`, with batches numbered from 0.

    Args:
        events: the events of this rank.
        since: nanoseconds of the rank's clock.
    """
    events = [e for e in events if e.start > since]
    ended = {e.instruction.batch for e in events if e.instruction.kind is Kind.STEP}
    forwards = [e.instruction for e in events if e.instruction.kind is Kind.F]
    first = min((i.span.start for i in forwards), default=0)  # some replicas of a stage begin with later samples
    begun = {i.batch for i in forwards if i.span.start == first}
    numbers = {batch: n for n, batch in enumerate(sorted(ended & begun))}
    return [
        e._replace(instruction=e.instruction._replace(batch=numbers[e.instruction.batch]))
        for e in events
        if e.instruction.batch in numbers
    ]
