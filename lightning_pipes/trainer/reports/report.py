"""A measured run beside the simulator's prediction, with advice."""

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
AMONG_SIBLINGS = "measured, among siblings: idle for this one"


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
        predicted: seconds of a step up to the optimizers' part, by the profile that they were chosen by.
        siblings: how many trainings at a time shared the ranks.
        measured: seconds of a step up to the optimizers' part, the median of the first `KEPT_STEPS`.
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
    predicted: float | None = None
    siblings: int = 1
    measured: float | None = None
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
        counts = Counter(id(round_[0].plan) for round_ in rounds)
        common = counts.most_common(1)[0][0]
        first = next(r[0] for r in rounds if id(r[0].plan) == common)
        name = "measured" if about.siblings == 1 else AMONG_SIBLINGS
        ran = [
            (Timeline.from_ranks([w.events for w in round_], first.plan, name=name), round_[0])
            for round_ in rounds
            if id(round_[0].plan) == common
        ]
        ran.sort(key=lambda each: each[0].makespan)
        costs = with_bytes(CostModel.from_timelines([timeline for timeline, _ in ran]), about.stages)
        measured, window = ran[len(ran) // 2]
        own = costs.with_recorded_times(
            measured
        )  # one thing is predicted and measured: this batch, operation by operation
        predicted = replace(simulate(window.order, window.plan, own, batches=window.uses), name="predicted")
        record = RunRecord(
            predicted,
            costs,
            measured,
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
        )
        return cls(record)

    @property
    def measured(self) -> Timeline:
        """The batch of median time among those kept, on all ranks."""
        assert self.record.measured is not None
        return self.record.measured

    @property
    def predicted(self) -> Timeline:
        """The same batch simulated: each operation takes what it took, and ranks wait for each other only."""
        return self.record.predicted

    @property
    def bubble_measured(self) -> float:
        """The share of all ranks' time in which they idled, 0 to 1; a sibling's of a job array in which they did not
        compute for it, but may have for others."""
        return _mean(self.measured.bubble)

    @property
    def bubble_predicted(self) -> float:
        """The same as the simulator has it."""
        return _mean(self.predicted.bubble)

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
        """Write timeline.png, measured above predicted, timeline.json for Perfetto, the page report.html, and
        run.json, from which `lightning-pipes report` writes the page again; return their paths."""
        from lightning_pipes.sim import save_chrome_trace, save_png
        from lightning_pipes.sim.page import page

        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        saved = ReportFiles(folder / "timeline.png", folder / "timeline.json", folder / "report.html", folder / FILE)
        save_png(self.measured, saved.picture, self.predicted)
        save_chrome_trace(self.measured, saved.trace)
        self.record.save(saved.record)
        saved.page.write_text(page(self.record, self.advice), encoding="utf-8")
        return saved

    def __str__(self) -> str:
        from lightning_pipes.sim import compare_timelines

        found = self.record.sibling_note or str(compare_timelines(self.predicted, self.measured))
        texts = [self.record.choice, found, self.record.queues_text, self.record.memory_text]
        return "\n\n".join(filter(None, texts))


def _choice(about: RunInfo, measured: Timeline) -> str:
    """Return the choice and its reason, and whether it came true."""
    if about.predicted is None or about.siblings > 1:
        return about.choice
    predicted = f"A step up to the optimizer: {seconds_text(1e9 * about.predicted)} predicted, "
    step = measured.makespan if about.measured is None else 1e9 * about.measured
    later = f", {seconds_text(measured.makespan)} at last" if abs(measured.makespan / step - 1) > CHANGED else ""
    return f"{about.choice}\n{predicted}{seconds_text(step)} measured{later}"


def _between(windows: Sequence[Window]) -> float | None:
    """Return the seconds from the end of one window to the start of the next on one rank, the median; None for one
    window."""
    ends = [(min(e.start for e in w.events), max(e.end for e in w.events)) for w in windows if w.events]
    gaps = [max(0, start - end) / 1e9 for (_, end), (start, _) in pairwise(ends)]
    return median(gaps) if gaps else None


def _mean(shares: Sequence[float]) -> float:
    return sum(shares) / len(shares)


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
    predicted = peak_bytes(order, plan, costs) if simple else ()  # type: ignore[arg-type]
    return describe_peaks(predicted, about.peaks, estimate_alternatives(plan, costs))
