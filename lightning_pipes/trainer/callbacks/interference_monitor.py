"""A callback that monitors the load on the device and the machine of each rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any, NamedTuple

import lightning.pytorch as pl

from lightning_pipes.engine.monitor.monitor import MAX_HERTZ, Monitor, free_metrics, sources_for
from lightning_pipes.ir import Kind, check_count, check_number
from lightning_pipes.ir.clock import read_nanoseconds
from lightning_pipes.sim.timeline import Event
from lightning_pipes.trainer.loop.host import PipelineCallback
from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.ranks.notices import Notices

MIN_PUBLICATION_SECONDS = 1.0
"""Minimum time between two publications of a rank's state, in seconds."""
_FORWARD_METRIC, _BACKWARD_METRIC = "pipeline.forward_seconds", "pipeline.backward_seconds"
_BACKWARD_KINDS = {Kind.R, Kind.B, Kind.I, Kind.W}
_HOOK_NAME = "on_train_batch_end"


class StageTimes(NamedTuple):
    """Mean times of one micro-batch on a stage since the last report, in seconds. NaN if no such operation has run."""

    forward: float
    backward: float


class RankState(NamedTuple):
    """The state of a rank.

    Attributes:
        features: features of the device and the machine, as returned by `Monitor.features`.
        stages: the times of the stages that the rank holds, by stage number.
        free: the number of free bytes on the device, or None if it is unknown.
    """

    features: Mapping[str, float]
    stages: Mapping[int, StageTimes]
    free: int | None


class InterferenceMonitor(PipelineCallback):
    """Samples the device and the machine of each rank during training, for planners, loggers and the report.

    This is the profiler of DynPipe (section III). It reads the hardware counters of the GPU if they are available
    (GPM), and otherwise values of the driver and of torch. On Linux, it also reads the time that the computing thread
    waited for a core, and information about pressure, quotas and memory. A value that a rank can't read is missing, and
    the log lists the sources once. Each rank samples in a separate thread, which takes at most 0.5 % of a core. No rank
    waits for another rank.

    Every `every_n_steps` batches, each logger receives the latest values of all ranks. They are means over the window,
    and are named like the metrics of Lightning's DeviceStatsMonitor, for example
    `InterferenceMonitor.on_train_batch_end/host.compute_wait_share.rank0`. The seconds that each stage needs for one
    micro-batch are logged as `InterferenceMonitor.on_train_batch_end/stage1.forward_seconds` and `.backward_seconds`.
    `strategy.report.save(...)` saves all curves. A planner that replans finds the features in `Problem.seen`.

    Args:
        hertz: the number of samples per second, at most 10.
        window: the time over which logged values are averaged, in seconds. It should cover at least two training steps.
        every_n_steps: the number of batches between two entries in the log.

    Raises:
        PipelineError: an argument is out of range, or the strategy of the trainer is not a PipelineStrategy.
    """

    def __init__(self, hertz: float = 4.0, window: float = 5.0, every_n_steps: int = 50) -> None:
        where = "InterferenceMonitor: "
        rate = f"above 0 and at most {MAX_HERTZ:g}"
        self.hertz = check_number(f"{where}hertz", hertz, rate, lambda x: 0 < x <= MAX_HERTZ)
        least = f"seconds, at least two samples long ({float(2 / hertz):g})"
        self.window = check_number(f"{where}window", window, least, lambda x: 2 / hertz <= x < math.inf)
        self.every_n_steps = check_count(f"{where}every_n_steps", every_n_steps)
        self._monitor: Monitor | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.pipeline(trainer)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = self.pipeline(trainer)
        device = strategy.root_device
        name, computations = f"rank {strategy.global_rank}", (_FORWARD_METRIC, _BACKWARD_METRIC)
        monitor = self._monitor = Monitor(
            sources_for(device), self.hertz, self.window, name, computations, free_metrics(device)
        )
        self._notices = Notices(strategy.control)
        self._ranks, self._rank = range(strategy.grid.size), strategy.grid.rank
        self._own: RankState | None = None
        self._said = self._until = 0
        self._batches = 0
        strategy.current_run.statistics.monitor = monitor
        monitor.start()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if self._monitor is None:
            return
        self._batches += 1
        due = self._batches % self.every_n_steps == 0
        now = read_nanoseconds()
        if due or now - self._said >= MIN_PUBLICATION_SECONDS * 1e9:
            self._said = now
            self._say(self.pipeline(trainer).current_run, self._monitor)
        if due and trainer.loggers and trainer.is_global_zero:
            self._log(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._stop()

    def everyone(self) -> list[RankState | None]:
        """Return the last published state of each global rank, or None for ranks that have not published a state.

        The method may be called while `fit` runs. It is not a collective call and does not block.
        """
        return [self._own if rank == self._rank else self._notices.find(str(rank)) for rank in self._ranks]

    def _stop(self) -> None:
        if self._monitor is not None:
            self._monitor.stop()
            self._monitor = None

    def _say(self, run: PipelineRun, monitor: Monitor) -> None:
        events = list(self._fresh(run))
        self._until = max((e.end for e in events), default=self._until)
        stages = stage_times(events)
        for name, place in ((_FORWARD_METRIC, 0), (_BACKWARD_METRIC, 1)):
            known = [times[place] for times in stages.values() if not math.isnan(times[place])]
            if known:
                monitor.record_values({name: sum(known)})
        self._own = RankState(monitor.features(), stages, monitor.free_bytes())
        self._notices.put(str(self._rank), self._own)

    def _fresh(self, run: PipelineRun) -> Iterable[Event]:
        """Yield the events of this rank since its last report, from batches in flight and from finished windows."""
        yield from (e for e in run.engine.events_so_far if e.end > self._until)
        for window in reversed(run.windows):
            fresh = [e for e in window.events if e.end > self._until]
            if not fresh:
                return
            yield from fresh

    def _log(self, trainer: pl.Trainer) -> None:
        found: dict[str, float] = {}
        for rank, state in enumerate(self.everyone()):
            if state is not None:
                found |= _named(rank, state)
        for logger in trainer.loggers:
            prefix = f"{type(self).__qualname__}.{_HOOK_NAME}{logger.group_separator}"
            logger.log_metrics({prefix + name: value for name, value in found.items()}, step=trainer.global_step)


def stage_times(events: Iterable[Event]) -> dict[int, StageTimes]:
    """Return the mean time of a forward and of a backward of each stage.

    The backward is the sum of the means of B, I and W.

    Args:
        events: events with times in nanoseconds.

    Returns:
        The times in seconds, by stage number.
    """
    took: dict[tuple[int, Kind], list[int]] = {}
    for _, i, start, end in events:
        if i.kind is Kind.F or i.kind in _BACKWARD_KINDS:
            took.setdefault((i.stage, i.kind), []).append(end - start)
    means = {key: fmean(times) / 1e9 for key, times in took.items()}
    stages = sorted({stage for stage, _ in means})
    return {
        stage: StageTimes(
            means.get((stage, Kind.F), math.nan),
            sum(means[stage, kind] for kind in _BACKWARD_KINDS if (stage, kind) in means) or math.nan,
        )
        for stage in stages
    }


def _named(rank: int, state: RankState) -> dict[str, float]:
    """Return the metrics of a rank by the names under which they are logged, without missing values and percentiles."""
    found = {f"{name}.rank{rank}": value for name, value in state.features.items() if not name.endswith("_p95")}
    for stage, times in state.stages.items():
        found |= {f"stage{stage}.forward_seconds": times.forward, f"stage{stage}.backward_seconds": times.backward}
    return {name: value for name, value in found.items() if not math.isnan(value)}
