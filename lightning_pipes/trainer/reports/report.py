"""A measured run compared with its prediction and its replay, with advice."""

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
from lightning_pipes.sim.shown.memory_use import describe_peaks, estimate_alternatives
from lightning_pipes.sim.shown.record import FILE, RunRecord
from lightning_pipes.sim.shown.training_record import Curves
from lightning_pipes.sim.timeline import Event, Timeline
from lightning_pipes.trainer.reports.stage_bytes import StageBytes, with_bytes

if TYPE_CHECKING:
    from lightning_pipes.planning.advice import Advice

KEPT_WINDOWS = 10
KEPT_STEPS = 100
"""The first batches of a run, whose time alone is kept: what was predicted a moment before is compared with them."""
CHANGED = 0.1
"""By what share the last steps differ from the first ones where that is worth a word: the machine does something else
too, or the data changed."""
AMONG_SIBLINGS = "measured, among siblings"


@dataclass(frozen=True)
class Window:
    """One batch's way through one rank: what was ordered, and when it ran on the rank's monotonic clock.

    Attributes:
        uses: the layers of each of its batches, where an endless policy ordered several.
    """

    plan: Plan
    order: Program | Policy
    events: Sequence[Event]
    uses: tuple[LayerUse, ...] | None = None


@dataclass(frozen=True)
class PredictedStep:
    """A step as it was predicted when the run was decided, before any step that it is compared with.

    Attributes:
        timeline: simulated by the profile of the decision, up to the optimizers' part.
        order: what orders it.
    """

    timeline: Timeline
    order: Program | Policy

    def is_of(self, window: Window) -> bool:
        """Return whether the window ran by the plan and the order that were predicted."""
        mine, theirs = self.timeline.plan, window.plan
        return (mine.layers, mine.ranks, mine.jobs) == (theirs.layers, theirs.ranks, theirs.jobs) and (
            self.order == window.order
        )


@dataclass(frozen=True)
class RunInfo:
    """Facts of a run besides its windows.

    Attributes:
        schedule: its name.
        settings: of the schedule.
        stages: bytes, of the stages where they are known.
        memory: bytes of every rank's device, None where there is no limit.
        profile: of the layers, where it is known.
        facts: for people, by name.
        choice: why it is this schedule, or this cut, for people; empty where nothing was chosen.
        predicted: the step as predicted by the profile that the choice was made by; None without one.
        unpredicted: why nothing was predicted, as a clause.
        siblings: how many trainings at a time shared the ranks.
        measured: seconds of a step up to the optimizers' part, the median of the first `KEPT_STEPS` since the
            prediction.
        steps: the number of these steps.
        monitored: what a monitor saw on every rank; empty without one.
        peaks: bytes that every rank has needed at most, None where nothing counts them.
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
    steps: int = KEPT_STEPS
    monitored: tuple[Curves, ...] = ()
    peaks: tuple[int | None, ...] = ()


class ReportFiles(NamedTuple):
    """The files of a report: a picture, a trace for Perfetto, the page, and what `lightning-pipes report` reads."""

    picture: Path
    trace: Path
    page: Path
    record: Path


@dataclass(frozen=True)
class PipelineReport:
    """The last training batches of a run."""

    record: RunRecord

    @classmethod
    def from_windows(cls, windows: Sequence[Sequence[Window]], about: RunInfo | None = None) -> PipelineReport:
        """Return the report on the windows of every pipeline rank; only batches of the most frequent plan count, among
        those with the layers where they were at last.

        Raises:
            PlanError: nothing was trained.
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
            rounds = rounds[-about.steps :]  # those that came after the prediction
        counts = Counter(id(round_[0].plan) for round_ in rounds)
        common = counts.most_common(1)[0][0]
        first = next(r[0] for r in rounds if id(r[0].plan) == common)
        name = "measured" if about.siblings == 1 else AMONG_SIBLINGS
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
        """The most typical of the last steps, on all ranks: the one whose operations run closest to their median
        times."""
        assert self.record.measured is not None
        return self.record.measured

    @property
    def predicted(self) -> Timeline | None:
        """The step as it was predicted before it ran, by the profile that the cut or the schedule was chosen by.

        None if there was no profile, or if the schedule or the cut changed later; `prediction_text` has the reason.
        """
        return self.record.predicted

    @property
    def replayed(self) -> Timeline:
        """The measured step, simulated with the recorded time of each of its operations.

        It predicts nothing: it differs from `measured` by the time that belongs to no operation and no message.
        """
        assert self.record.replayed is not None
        return self.record.replayed

    @property
    def bubble_measured(self) -> float | None:
        """The bubble of `measured`: the share of the step in which ranks do not compute, the mean of all ranks, 0 to 1.

        None for a sibling of a job array, because the ranks compute for other siblings meanwhile.
        """
        return self.record.bubble

    @property
    def bubble_predicted(self) -> float | None:
        """The bubble of `predicted`; None if nothing was predicted."""
        return None if self.predicted is None else self.predicted.mean_bubble

    @property
    def bubble_replayed(self) -> float | None:
        """The bubble of `replayed`; None for a sibling of a job array."""
        return None if self.record.siblings > 1 else self.replayed.mean_bubble

    @property
    def prediction_text(self) -> str:
        """The predicted step compared with the measured one, or why nothing was predicted; empty for siblings."""
        return self.record.prediction_text

    @cached_property
    def advice(self) -> Advice:
        """Advice on slow parts and on changes, found by simulating changes.

        It takes seconds of work, with a progress bar, for hundreds of micro-batches.
        """
        from lightning_pipes.planning.advice import advise_run
        from lightning_pipes.planning.formatting import progress_bar

        with progress_bar("trying changes for the report") as show_progress:
            return advise_run(self.record, show_progress)

    def save(self, directory: str | Path) -> ReportFiles:
        """Write timeline.png, timeline.json for Perfetto, the page report.html, and run.json, from which
        `lightning-pipes report` writes the page again; return their paths.

        The picture shows the measured step, and below it the predicted one if there was a prediction.
        """
        from lightning_pipes.sim import save_chrome_trace, save_png
        from lightning_pipes.sim.page import page

        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        saved = ReportFiles(folder / "timeline.png", folder / "timeline.json", folder / "report.html", folder / FILE)
        alone = self.record.siblings == 1
        predicted = replace(self.predicted, name="predicted before it ran") if self.predicted and alone else None
        save_png(self.measured, saved.picture, predicted, idle=alone)
        save_chrome_trace(self.measured, saved.trace)
        self.record.save(saved.record)
        saved.page.write_text(page(self.record, self.advice), encoding="utf-8")
        return saved

    def __str__(self) -> str:
        from lightning_pipes.sim import compare_timelines

        record = self.record
        compared = (self.predicted, self.replayed) if record.siblings == 1 else ()
        found = [str(compare_timelines(timeline, self.measured)) for timeline in compared if timeline is not None]
        texts = [record.choice, record.sibling_note, record.prediction_text, *found]
        return "\n\n".join(filter(None, [*texts, record.queues_text, record.memory_text]))


def find_typical_step(steps: Sequence[Timeline]) -> int:
    """Return the position of the step that is closest to the medians of all: of its length, and of when each operation
    starts and ends. A hiccup in one operation delays all that follow, so such a step is far from the medians.

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
    """Return the prediction of a window, or None and the reason, as a clause."""
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
    """Return the choice and its reason, and whether it came true."""
    if about.predicted is None or about.siblings > 1:
        return about.choice
    predicted = f"A step up to the optimizer: {seconds_text(about.predicted.timeline.makespan)} predicted, "
    step = measured.makespan if about.measured is None else 1e9 * about.measured
    later = f", {seconds_text(measured.makespan)} at last" if abs(measured.makespan / step - 1) > CHANGED else ""
    return "\n".join(filter(None, [about.choice, f"{predicted}{seconds_text(step)} measured{later}"]))


def _between(windows: Sequence[Window]) -> float | None:
    """Return the seconds from the end of one window to the start of the next on one rank, the median; None for one
    window."""
    ends = [(min(e.start for e in w.events), max(e.end for e in w.events)) for w in windows if w.events]
    gaps = [max(0, start - end) / 1e9 for (_, end), (start, _) in pairwise(ends)]
    return median(gaps) if gaps else None


def describe_memory(windows: Sequence[Sequence[Window]], about: RunInfo) -> str:
    """Return sentences on the peak of each rank in the largest of the last batches; empty where nothing is known.

    Nothing is simulated: where batches overlap, or a policy orders them, only what was measured is reported.

    Args:
        windows: of every rank, as a report takes them.
    """
    if about.siblings > 1:  # they share the ranks' memory
        return ""
    last = windows[0][-1].plan
    window = max((w for w in windows[0] if w.plan.layers == last.layers), key=lambda w: w.plan.jobs[0].rows)
    plan, order = window.plan, window.order
    costs = with_bytes(CostModel.uniform(plan.n_stages, 1.0, 1.0), about.stages)
    simple = isinstance(order, Program) and not order.is_endless and bool(costs.weight_bytes)
    estimated = peak_bytes(order, plan, costs) if simple else ()  # type: ignore[arg-type]
    resident = all(limit is None for limit in about.memory)
    return describe_peaks(estimated, about.peaks, estimate_alternatives(plan, costs), resident)
