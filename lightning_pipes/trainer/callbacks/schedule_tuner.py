"""A callback that switches between batches to the schedule that is fastest on the measured links."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from operator import le
from typing import Any, NamedTuple

import lightning.pytorch as pl

from lightning_pipes.cost import CostModel, Link
from lightning_pipes.cost.units import parse_bytes, parse_setting
from lightning_pipes.ir import (
    SEND_KINDS,
    Kind,
    Plan,
    PlanError,
    Policy,
    Schedule,
    check_count,
    check_type,
)
from lightning_pipes.ir.clock import read_seconds
from lightning_pipes.planning.candidates import Candidate, TuningPlanner, tuning_planner
from lightning_pipes.planning.measured import WINDOW_STEPS, Averages, StepSample, parts_of
from lightning_pipes.planning.tuning import MIN_SWITCH_GAIN, CandidateRanker, TuningDecision
from lightning_pipes.sim import load_kernel
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.loop.adopting import adopt_candidate
from lightning_pipes.trainer.loop.host import PipelineCallback, PipelineHost
from lightning_pipes.trainer.loop.step_statistics import sample_of
from lightning_pipes.trainer.plan.profile_planner import device_memory
from lightning_pipes.trainer.reports.report import Window
from lightning_pipes.trainer.reports.stage_bytes import StageBytes, with_bytes

MAX_DECISION_SHARE = 0.005
"""The share of time that decisions may take. If they take more, they are made less often."""
PROBE_BYTES, N_PROBES = (2**12, 2**17), 5
"""Sizes of the messages that probe links, in bytes, and the number of messages of each size."""
MAX_INTERVAL_FACTOR = 20
"""Maximum factor by which decisions are made less often because of their cost. It is limited because the first
decision includes setup work."""

FIRST_DECISION_BATCH = 2
"""Number of batches before the first decision, because the very first batch includes work that is done only once.
The second decision follows after a full window of steps."""

MAX_PYTHON_FORWARDS = 3000
"""Number of forwards of all stages, in all candidates, above which compiled code is loaded in advance. Without it,
evaluating all candidates would take about 10 ms."""

_log = logging.getLogger(__name__)


class _Report(NamedTuple):
    """The report of a rank to rank 0.

    It contains the last steps of the rank, the bytes of its stages, its position in the pipeline, the memory of its
    device in bytes, and its links if they were probed.
    """

    steps: list[StepSample]
    stages: dict[int, StageBytes]
    position: int
    memory: int | None
    links: dict[tuple[int, int], Link]


class _Order(NamedTuple):
    """The decision of rank 0 for all ranks.

    Attributes:
        change: the verified candidate that runs from the next batch on, or None if nothing changes.
        wait: the number of batches until the next decision.
        measure_clock_offsets: whether the clocks have jumped, so that their offsets must be measured again.
        metrics: the values to log, by name.
    """

    change: Candidate | None
    wait: int
    measure_clock_offsets: bool
    metrics: dict[str, float]


@dataclass(frozen=True)
class TuningRecord:
    """The record of one decision on rank 0.

    Attributes:
        batch: the number of batches trained before the decision.
        decision: the ranking of the candidates, and the selected candidate.
        measured: the mean duration of the last steps before the decision, in seconds.
        seconds: the time needed to summarize the last steps and to decide, in seconds. It does not include the time
            spent waiting for other ranks to finish the batch.
    """

    batch: int
    decision: TuningDecision
    measured: float
    seconds: float

    @property
    def error(self) -> float:
        """The relative error of the predicted step time with the current schedule, compared with the measured step
        time."""
        return self.decision.current.seconds / self.measured - 1 if self.measured else 0.0


class ScheduleTuner(PipelineCallback):
    """Simulates other schedules with measured times every few batches, and switches to the fastest one.

    This is the tuner of Ada-Grouper (Wang et al. 2023, arXiv:2303.01675, sections 3.2.2 and 4.3), but it does not
    suspend the training. Messages carry time stamps, so that the links are measured in every step. All ranks switch
    between the same two batches. Layers stay on their ranks, and gradients are bitwise equal as long as the size of
    micro-batches does not change.

    With `PipelineStrategy("kfkb", schedule_args={"k": "auto"})` (Hydra: schedule=kfkb schedule.k=auto), a tuner with
    default arguments is added to a trainer without one. The candidates are provided by the schedule with which a run
    begins (`list_candidates`). They include orders with a split backward if layers were measured (`partition="auto"`).

    Each logger receives these metrics:

    - `tuner/predicted_ms`: the predicted duration of a step after the decision.
    - `tuner/gain`: the share of a step that the change saves, or 0 if nothing changes.
    - `tuner/error`: the error of the last prediction.
    - `tuner/unsteadiness`: the standard deviation of the transfer times divided by their mean, on the worst link.
    - `tuner/slack`: the minimum number of micro-batches that were ready when a stage began its next
      computation, while the pipeline was full.
    - `tuner/stalled`: the share of a step that the rank with the fewest stalls waited. If it is below `hysteresis`, the
      order does not change.
    - `tuner/ms`: the cost of the decision.

    Args:
        interval: the number of batches, or the time, between decisions. The interval is extended if deciding would take
            more than 0.5 % of it.
        memory_limit: the number of bytes that each rank may hold, such as "16GiB". By default, it is the memory of the
            GPU. On the CPU, there is no limit by default.
        sizes: the micro-batch sizes to choose from, in samples. By default, the size does not change. A different size
            changes the order of summation, and the batches that layers such as BatchNorm see.
        hysteresis: the smallest predicted gain that causes a change, as a share of a step.
        window: the number of steps over which transfer times are averaged.
        probe: whether links are measured with separate messages while training waits. This option exists for
            comparisons. In contrast to the paper, which sends the tensors of each plan, latency and bandwidth are
            fitted to messages of 4 and 128 KiB.

    Attributes:
        decisions: all decisions of this run, on rank 0.

    Raises:
        PipelineError: an argument is out of range. When training starts: the strategy is not a PipelineStrategy, or its
            schedule does not have candidates.
    """

    def __init__(
        self,
        interval: int | timedelta = 50,
        memory_limit: int | str | None = None,
        sizes: Sequence[int] = (),
        hysteresis: float = MIN_SWITCH_GAIN,
        window: int = WINDOW_STEPS,
        probe: bool = False,
    ) -> None:
        if not isinstance(interval, timedelta):
            check_count("ScheduleTuner: interval", interval, "; steps, or a timedelta")
        elif interval <= timedelta():
            raise PlanError(f"ScheduleTuner: interval must be longer than nothing, got {interval!r}")
        self.interval = interval
        self.memory_limit = (
            None if memory_limit is None else parse_setting("ScheduleTuner: memory_limit", parse_bytes, memory_limit)
        )
        self.sizes = tuple(check_type("ScheduleTuner: sizes", sizes, Sequence[int]))
        for size in self.sizes:
            check_count("ScheduleTuner: sizes of micro-batches", size)
        self.window = check_count("ScheduleTuner: window", window)
        self.probe = check_type("ScheduleTuner: probe", probe, bool)
        self.decisions: list[TuningRecord] = []
        self._chooser = CandidateRanker(hysteresis)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = self.pipeline(trainer)
        self._source: TuningPlanner = tuning_planner(strategy.schedule)
        self._running: Candidate | None = None
        decision = strategy.decision
        self._averages = Averages(self.window, parts=parts_of(decision.profile, decision.layers))
        self._batches, self._read = 0, 0
        self._next = FIRST_DECISION_BATCH
        self.decisions.clear()
        strategy.current_run.engine.measure_clock_offsets()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self._batches += 1
        strategy = self.pipeline(trainer)
        if self._batches == 1 and strategy.global_rank == strategy.control.ranks[0]:
            self._prepare(strategy.current_run.windows[-1].plan)
        if self._batches < self._next:
            return
        order = self._decide(strategy)
        self._next = self._batches + order.wait
        if order.measure_clock_offsets:
            strategy.current_run.engine.measure_clock_offsets()
        if order.change is not None:
            adopt_candidate(strategy.current_run, order.change)
            strategy.schedule = order.change.schedule
        for logger in trainer.loggers:  # loggers ignore the call on ranks other than 0
            logger.log_metrics(order.metrics, trainer.global_step)

    def _prepare(self, plan: Plan) -> None:
        """Set up everything that does not need measurements.

        This happens after the first batch, which is slow anyway.
        """
        nothing_known = CostModel.uniform(plan.n_stages, forward=1.0, backward=2.0)
        candidates = self._source.list_candidates(plan, nothing_known, None, self.sizes)
        if sum(c.n_microbatches for c in candidates) * plan.n_stages > MAX_PYTHON_FORWARDS:
            load_kernel()
        self._chooser.prepare(candidates, nothing_known)

    def _decide(self, strategy: PipelineHost) -> _Order:
        """Gather the measurements of all ranks, and return the decision of rank 0. This is a collective call."""
        began = read_seconds()
        run, control = strategy.current_run, strategy.control
        windows = list(run.windows)
        fresh = min(len(windows) - 1, self._batches - self._read, self.window)
        self._read = self._batches
        steps = [sample_of(*pair) for pair in pairwise(windows[-fresh - 1 :])]
        links = run.engine.probe_links(PROBE_BYTES, N_PROBES) if self.probe else {}
        position = run.global_ranks.index(strategy.global_rank)
        mine = _Report(
            steps, run.stage_bytes(strategy.optimizers), position, device_memory(strategy.root_device), links
        )
        waited = read_seconds()
        reports = control.gather(mine, to=control.ranks[0])
        began += read_seconds() - waited  # exclude waiting for the last rank, which happens after each batch anyway
        order = None
        if reports is not None:
            latest = reversed(windows)  # use the latest plan with the largest batch, and not a short last batch
            plan = max((w.plan for w in latest), key=lambda plan: plan.jobs[0].rows)
            order = self._order(reports, strategy.schedule, plan, _gap(windows), began)
        agreed: _Order = control.broadcast(order, control.ranks[0])
        return agreed

    def _order(
        self, reports: Sequence[_Report], schedule: Schedule | Policy, plan: Plan, step: float, began: float
    ) -> _Order:
        links = {pair: link for report in reports for pair, link in report.links.items()}
        stages = {number: size for report in reports for number, size in report.stages.items()}
        for samples in zip(*(report.steps for report in reports), strict=True):
            self._averages.add(_probe_links(s, links, stages, plan) for s in samples)
        limit = self._limit(reports, plan.n_ranks)
        base = with_bytes(CostModel(self._averages.costs().seconds), stages)
        candidates = self._source.list_candidates(plan, self._averages.costs(base), limit, self.sizes)
        current = self._running
        if current is None or current.schedule != schedule:
            current = Candidate(candidates[0].schedule if schedule.tunes_online else schedule, plan, ())
        if not current.peak_bytes or limit is None or all(map(le, current.peak_bytes, limit)):
            # The current candidate may come from earlier link speeds, or may have a different size.
            candidates = (*candidates, current)
        decision = self._chooser.decide(candidates, current, self._averages, base)
        self._running = decision.chosen.candidate
        took = [max(s.took for s in samples) for samples in zip(*(r.steps for r in reports), strict=True)]
        tuned = TuningRecord(
            self._batches, decision, sum(took) / len(took) / 1e9 if took else 0.0, read_seconds() - began
        )
        self.decisions.append(tuned)
        _log.log(logging.INFO if decision.has_change else logging.DEBUG, "batch %d: %s", self._batches, decision)
        change = decision.chosen.candidate if decision.has_change else None
        wait = self.window if self._batches == FIRST_DECISION_BATCH else self._wait(step, tuned)
        jumped = self._averages.impossible > 0
        return _Order(change, wait, jumped, _metrics(tuned))

    def _limit(self, reports: Sequence[_Report], ranks: int) -> list[int] | None:
        """Return the number of bytes that each rank of the pipeline may hold, or None without a limit.

        With several replicas, the smallest limit of each rank is used.
        """
        if self.memory_limit is not None:
            return [self.memory_limit] * ranks
        known = [
            [r.memory for r in reports if r.position == position and r.memory is not None] for position in range(ranks)
        ]
        return [min(found) for found in known] if all(known) else None

    def _wait(self, step: float, tuned: TuningRecord) -> int:
        """Return the number of batches until the next decision."""
        if isinstance(self.interval, timedelta):
            batches = round(self.interval.total_seconds() / step) if step else 1
        else:
            batches = self.interval
        cheap = -(-tuned.seconds // (MAX_DECISION_SHARE * step)) if step else 0
        return max(1, batches, min(int(cheap), MAX_INTERVAL_FACTOR * max(1, batches)))


def _probe_links(
    sample: StepSample, links: Mapping[tuple[int, int], Link], stages: Mapping[int, StageBytes], plan: Plan
) -> StepSample:
    """Replace the transfer times of a sample by the times over the probed links, if links were probed."""
    means = dict(sample.means)
    for kind, stage, rows in sample.means if links else ():
        if kind in SEND_KINDS:
            edge, target = (stage, stage + 1) if kind is Kind.SF else (stage - 1, stage - 1)
            link = links[plan.ranks[stage], plan.ranks[target]]
            means[kind, stage, rows] = 1e9 * link.message_seconds(stages[edge].output * rows)
    return sample._replace(means=means)


def _gap(windows: Sequence[Window]) -> float:
    """Return the mean time from one batch to the next in seconds."""
    begins = [min(e.start for e in w.events) for w in windows if w.events]
    return (begins[-1] - begins[0]) / 1e9 / (len(begins) - 1) if len(begins) > 1 else 0.0


def _metrics(tuned: TuningRecord) -> dict[str, float]:
    decision = tuned.decision
    return {
        "tuner/predicted_ms": 1e3 * decision.chosen.seconds,
        "tuner/gain": decision.gain,
        "tuner/error": tuned.error,
        "tuner/unsteadiness": decision.unsteadiness,
        "tuner/ms": 1e3 * tuned.seconds,
        **({} if decision.slack is None else {"tuner/slack": float(decision.slack)}),
        **({} if decision.stalled is None else {"tuner/stalled": decision.stalled}),
    }


def add_tuner(trainer: pl.Trainer, schedule: Schedule | Policy) -> None:
    """Add a ScheduleTuner to the trainer if the schedule needs one and the trainer does not have one."""
    callbacks = private.callbacks(trainer)
    if schedule.tunes_online and not any(isinstance(c, ScheduleTuner) for c in callbacks):
        callbacks.append(ScheduleTuner())
