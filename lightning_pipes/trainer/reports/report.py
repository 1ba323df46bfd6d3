"""Compares a measured run with its prediction and its replay, and gives advice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_pipes.cost import CostModel, ModelProfile
from lightning_pipes.cost.units import seconds_text
from lightning_pipes.ir import LayerUse, Plan, PlanError, Policy, Program
from lightning_pipes.planning.memory import peak_bytes
from lightning_pipes.sim import simulate
from lightning_pipes.sim.records.memory_use import describe_peaks, estimate_alternatives
from lightning_pipes.sim.records.record import PADDING_FACT, RUN_FILE, RunRecord
from lightning_pipes.sim.records.training_record import Curves
from lightning_pipes.sim.timeline import Event, Timeline
from lightning_pipes.trainer.reports.stage_bytes import StageBytes, with_bytes

if TYPE_CHECKING:
    from lightning_pipes.planning.advice import Advice

MAX_REPORTED_WINDOWS = 10
MAX_REPORTED_STEPS = 100
"""Number of batches after a prediction whose step times are recorded, to be compared with the prediction."""
MIN_REPORTED_CHANGE = 0.1
"""Relative difference between the last steps and the first steps above which it is mentioned. It means that other
programs use the machine too, or that the data changed."""
SIBLINGS_LABEL = "measured, among siblings"


@dataclass(frozen=True)
class Window:
    """One window on one rank: the executed order, and the events with times on the monotonic clock of the rank.

    Attributes:
        uses: the layers of each batch of the window, if an endless policy ordered several batches.
    """

    plan: Plan
    order: Program | Policy
    events: Sequence[Event]
    uses: tuple[LayerUse, ...] | None = None


@dataclass(frozen=True)
class PredictedStep:
    """A prediction of a step, made when the run was decided and before any step with which it is compared.

    Attributes:
        timeline: the timeline up to the optimizer step, simulated with the profile of the decision.
        order: the program or policy that orders the step.
    """

    timeline: Timeline
    order: Program | Policy

    def is_of(self, window: Window) -> bool:
        """Return whether the window was run with the plan and the order of this prediction."""
        mine, theirs = self.timeline.plan, window.plan
        return (mine.layers, mine.ranks, mine.jobs) == (theirs.layers, theirs.ranks, theirs.jobs) and (
            self.order == window.order
        )


@dataclass(frozen=True)
class RunInfo:
    """Information about a run that is not contained in its windows.

    Attributes:
        schedule: the name of the schedule.
        settings: the settings of the schedule.
        stages: the bytes of the stages for which they are known.
        memory: the memory of the device of each rank in bytes, or None for a rank without a limit.
        profile: the profile of the layers, if it is known.
        facts: descriptions for readers, by name.
        choice: the reason for the choice of the schedule or the cut, for readers. Empty if nothing was chosen.
        predicted: the step as predicted with the profile on which the choice was based, or None without a profile.
        unpredicted: the reason why there is no prediction, as a clause.
        siblings: the number of training jobs that shared the ranks at a time.
        measured: the median duration of the first `MAX_REPORTED_STEPS` steps since the prediction, in seconds, up to
            the optimizer step.
        steps: the number of these steps.
        monitored: the curves of the monitor on each rank. Empty without a monitor.
        peaks: the peak memory of each rank in bytes, or None for a rank on which it is not measured.
    """

    schedule: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    stages: Mapping[int, StageBytes] = field(default_factory=dict)
    memory: tuple[int | None, ...] = ()
    profile: ModelProfile | None = None
    facts: Mapping[str, str] = field(default_factory=dict)
    choice: str = ""
    predicted: PredictedStep | None = None
    unpredicted: str = ""
    siblings: int = 1
    measured: float | None = None
    steps: int = MAX_REPORTED_STEPS
    monitored: tuple[Curves, ...] = ()
    peaks: tuple[int | None, ...] = ()


class ReportFiles(NamedTuple):
    """The paths of the files of a report.

    The files are a picture, a trace for Perfetto, the page, and the input of `lightning-pipes report`.
    """

    picture: Path
    trace: Path
    page: Path
    record: Path


@dataclass(frozen=True)
class PipelineReport:
    """A report on the last training batches of a run."""

    record: RunRecord

    @classmethod
    def from_windows(cls, windows: Sequence[Sequence[Window]], about: RunInfo | None = None) -> PipelineReport:
        """Create a report from the windows of all pipeline ranks.

        Among the batches for which the layers were on the same ranks as in the last batch, only batches of the most
        frequent plan are used.

        Args:
            windows: the windows of each pipeline rank, in the same order on all ranks.
            about: further information about the run.

        Raises:
            PlanError: no batch was trained.
        """
        about = about or RunInfo()
        rounds = list(zip(*windows, strict=True))
        if not rounds:
            raise PlanError(
                "there is nothing to report: no batch was trained by a schedule of this strategy. Manual optimization "
                "has no timeline, as stages take turns"
            )
        rounds = [round_ for round_ in rounds if round_[0].plan.layers == rounds[-1][0].plan.layers]
        if about.predicted is not None and about.steps:
            rounds = rounds[-about.steps :]  # keep only batches after the prediction
        counts = Counter(id(round_[0].plan) for round_ in rounds)
        common = counts.most_common(1)[0][0]
        first = next(r[0] for r in rounds if id(r[0].plan) == common)
        name = "measured" if about.siblings == 1 else SIBLINGS_LABEL
        ran = [
            (Timeline.from_ranks([w.events for w in round_], first.plan, name=name), round_[0])
            for round_ in rounds
            if id(round_[0].plan) == common
        ]
        costs = with_bytes(CostModel.from_timelines([timeline for timeline, _ in ran]), about.stages)
        measured, window = ran[find_typical_step([timeline for timeline, _ in ran])]
        own = costs.with_recorded_times(measured)
        replayed = simulate(window.order, window.plan, own, batches=window.uses)
        predicted, unpredicted = _prediction(about, window)
        record = RunRecord(
            predicted,
            costs,
            measured,
            replace(replayed, name="replayed"),
            about.schedule,
            about.settings,
            about.profile,
            about.memory,
            _between(windows[0]) if about.siblings == 1 else None,
            about.facts,
            _choice(about, measured),
            about.siblings,
            about.monitored,
            about.peaks,
            unpredicted,
        )
        return cls(record)

    @property
    def measured(self) -> Timeline:
        """The most typical of the last steps, on all ranks.

        In this step, the times of the operations are closest to their medians.
        """
        assert self.record.measured is not None
        return self.record.measured

    @property
    def predicted(self) -> Timeline | None:
        """The step as it was predicted before it ran.

        The prediction uses the profile on which the choice of the cut or the schedule was based. It is None if there
        was no profile, or if the schedule or the cut changed later. `prediction_text` contains the reason.
        """
        return self.record.predicted

    @property
    def replayed(self) -> Timeline:
        """The measured step, simulated with the recorded time of each of its operations.

        This is not a prediction. It differs from `measured` by the time that is not part of any operation or message.
        """
        assert self.record.replayed is not None
        return self.record.replayed

    @property
    def bubble_measured(self) -> float | None:
        """The bubble of `measured`, which is the mean share of the step in which ranks do not compute, from 0 to 1.

        None for a sibling of a job array, because its ranks also compute for other siblings.
        """
        return self.record.bubble

    @property
    def bubble_predicted(self) -> float | None:
        """The bubble of `predicted`, or None if there is no prediction."""
        return None if self.predicted is None else self.predicted.mean_bubble

    @property
    def bubble_replayed(self) -> float | None:
        """The bubble of `replayed`, or None for a sibling of a job array."""
        return None if self.record.siblings > 1 else self.replayed.mean_bubble

    @property
    def prediction_text(self) -> str:
        """A comparison of the predicted step with the measured step, or the reason why there is no prediction.

        Empty for siblings of a job array.
        """
        return self.record.prediction_text

    @cached_property
    def advice(self) -> Advice:
        """Advice on slow parts and on improvements, which are found by simulating changes.

        With hundreds of micro-batches, this takes seconds, and a progress bar is shown.
        """
        from lightning_pipes.planning.advice import advise_run
        from lightning_pipes.planning.formatting import progress_bar

        with progress_bar("trying changes for the report") as show_progress:
            return advise_run(self.record, show_progress)

    def save(self, directory: str | Path) -> ReportFiles:
        """Write the files of the report.

        The files are the picture timeline.png, the trace timeline.json for Perfetto, the page report.html, and
        run.json, from which `lightning-pipes report` can write the page again. The picture shows the measured step and,
        if there was a prediction, the predicted step below it.

        Args:
            directory: the directory for the files, which is created if necessary.

        Returns:
            The paths of the files.
        """
        from lightning_pipes.sim import save_chrome_trace, save_png
        from lightning_pipes.sim.page import render_page

        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        saved = ReportFiles(
            folder / "timeline.png", folder / "timeline.json", folder / "report.html", folder / RUN_FILE
        )
        alone = self.record.siblings == 1
        predicted = replace(self.predicted, name="predicted before it ran") if self.predicted and alone else None
        save_png(self.measured, saved.picture, predicted, idle=alone)
        save_chrome_trace(self.measured, saved.trace)
        self.record.save(saved.record)
        saved.page.write_text(render_page(self.record, self.advice), encoding="utf-8")
        return saved

    def __str__(self) -> str:
        from lightning_pipes.sim import compare_timelines

        record = self.record
        compared = (self.predicted, self.replayed) if record.siblings == 1 else ()
        found = [str(compare_timelines(timeline, self.measured)) for timeline in compared if timeline is not None]
        padding = record.facts.get(PADDING_FACT, "")
        texts = [record.choice, record.sibling_note, padding, record.prediction_text, *found]
        return "\n\n".join(filter(None, [*texts, record.queues_text, record.memory_text]))


def find_typical_step(steps: Sequence[Timeline]) -> int:
    """Return the index of the step that is closest to the medians of all steps.

    The compared values are the makespan of each step, and the start and end of each operation. A delay in a single
    operation also delays all following operations, so that such a step is far from the medians.

    Args:
        steps: timelines of the same operations.
    """
    times = [{e.instruction: (e.start, e.end) for e in step.events} for step in steps]
    medians = {
        i: tuple(map(median, zip(*(step.get(i, ends) for step in times), strict=True))) for i, ends in times[0].items()
    }
    usual = median(step.makespan for step in steps)

    def distance(number: int) -> float:
        own = times[number]
        moved = [abs(a - b) for i, ends in medians.items() if i in own for a, b in zip(own[i], ends, strict=True)]
        return abs(steps[number].makespan - usual) + (sum(moved) / len(moved) if moved else 0.0)

    return min(range(len(steps)), key=distance)


def _prediction(about: RunInfo, window: Window) -> tuple[Timeline | None, str]:
    """Return the prediction of a window, or None and the reason why there is no prediction, as a clause."""
    if about.siblings > 1:
        return None, "siblings of a job array share the ranks"
    if about.predicted is None:
        return None, about.unpredicted
    if not about.steps:
        return None, "the prediction was corrected after the last step that is shown"
    if not about.predicted.is_of(window):
        return None, "the schedule, the cut or the batch size changed after the prediction"
    return replace(about.predicted.timeline, name="predicted"), ""


def _choice(about: RunInfo, measured: Timeline) -> str:
    """Return the choice with its reason, and compare the predicted step time with the measured one."""
    if about.predicted is None or about.siblings > 1:
        return about.choice
    predicted = f"Step time, excluding the optimizer: {seconds_text(about.predicted.timeline.makespan)} predicted, "
    step = measured.makespan if about.measured is None else 1e9 * about.measured
    later = (
        f", and {seconds_text(measured.makespan)} in the last steps"
        if abs(measured.makespan / step - 1) > MIN_REPORTED_CHANGE
        else ""
    )
    return "\n".join(filter(None, [about.choice, f"{predicted}{seconds_text(step)} measured{later}"]))


def _between(windows: Sequence[Window]) -> float | None:
    """Return the median time from the end of one window to the start of the next on one rank, in seconds.

    The result is None if there is only one window.
    """
    ends = [(min(e.start for e in w.events), max(e.end for e in w.events)) for w in windows if w.events]
    gaps = [max(0, start - end) / 1e9 for (_, end), (start, _) in pairwise(ends)]
    return median(gaps) if gaps else None


def describe_memory(windows: Sequence[Sequence[Window]], about: RunInfo) -> str:
    """Return a description of the peak memory of each rank in the largest of the last batches.

    The result is empty if nothing is known. If batches overlap or are ordered by a policy, nothing is estimated, and
    only measured values are described.

    Args:
        windows: the windows of each rank, as for `PipelineReport.from_windows`.
        about: further information about the run.
    """
    if about.siblings > 1:  # the siblings share the memory of the ranks
        return ""
    last = windows[0][-1].plan
    window = max((w for w in windows[0] if w.plan.layers == last.layers), key=lambda w: w.plan.jobs[0].rows)
    plan, order = window.plan, window.order
    costs = with_bytes(CostModel.uniform(plan.n_stages, 1.0, 1.0), about.stages)
    simple = isinstance(order, Program) and not order.is_endless and bool(costs.weight_bytes)
    estimated = peak_bytes(order, plan, costs) if simple else ()  # type: ignore[arg-type]
    resident = all(limit is None for limit in about.memory)
    return describe_peaks(estimated, about.peaks, estimate_alternatives(plan, costs), resident)
