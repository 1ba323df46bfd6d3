"""What a run did, against what the simulator foretells for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_pipes.ir import Plan, PlanError, Policy, Program
from lightning_pipes.sim.timeline import Event, Timeline

KEPT_WINDOWS = 10


@dataclass(frozen=True)
class Window:
    """One batch's way through one rank: what was ordered, and when it ran on the rank's monotonic clock."""

    plan: Plan
    order: Program | Policy
    events: Sequence[Event]


@dataclass(frozen=True)
class PipelineReport:
    """The last training batches of a run.

    Attributes:
        measured: the batch whose time is the median of those kept, on all ranks.
        predicted: the same program simulated with the medians of all kept batches.
    """

    measured: Timeline
    predicted: Timeline

    @classmethod
    def of(cls, windows: Sequence[Sequence[Window]]) -> PipelineReport:
        """The report on the windows of every pipeline rank; only batches of the most frequent plan count.

        Raises:
            PlanError: nothing was trained.
        """
        from lightning_pipes.cost import CostModel
        from lightning_pipes.sim import simulate

        rounds = list(zip(*windows, strict=True))
        if not rounds:
            raise PlanError("there is nothing to report: no batch was trained with this strategy")
        counts = Counter(id(round_[0].plan) for round_ in rounds)
        common = counts.most_common(1)[0][0]
        first = next(r[0] for r in rounds if id(r[0].plan) == common)
        timelines = [
            Timeline.gather([w.events for w in round_], first.plan, name="measured")
            for round_ in rounds
            if id(round_[0].plan) == common
        ]
        timelines.sort(key=lambda t: t.makespan)
        costs = CostModel.measured(timelines)
        predicted = replace(simulate(first.order, first.plan, costs), name="predicted")
        return cls(timelines[len(timelines) // 2], predicted)

    @property
    def bubble_measured(self) -> float:
        """The share of all ranks' time in which they idled, 0 to 1."""
        return _mean(self.measured.bubble)

    @property
    def bubble_predicted(self) -> float:
        """The same as the simulator has it."""
        return _mean(self.predicted.bubble)

    def save(self, directory: str | Path) -> tuple[Path, Path]:
        """Writes timeline.png, measured above predicted, and timeline.json for Perfetto; returns their paths."""
        from lightning_pipes.sim import save_chrome_trace, save_png

        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        picture, trace = folder / "timeline.png", folder / "timeline.json"
        save_png(self.measured, picture, self.predicted)
        save_chrome_trace(self.measured, trace)
        return picture, trace

    def __str__(self) -> str:
        from lightning_pipes.sim import compare

        return str(compare(self.predicted, self.measured))


def _mean(shares: Sequence[float]) -> float:
    return sum(shares) / len(shares)
