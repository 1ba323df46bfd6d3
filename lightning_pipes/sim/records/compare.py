"""Compare simulated with measured timelines, and find the slowest rank of a timeline."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median

from lightning_pipes.cost.units import seconds_text
from lightning_pipes.ir import Kind
from lightning_pipes.sim.timeline import Timeline


@dataclass(frozen=True)
class TimelineComparison:
    """A comparison of two timelines of the same work.

    Attributes:
        makespan: the simulated and the measured makespan in nanoseconds.
        bubble: for each rank the simulated and the measured bubble, from 0 to 1.
        medians: the simulated and the measured median nanoseconds by (kind, stage), for kinds that both timelines have.
        moved: the share of computations, from 0 to 1, that ran at another position in the order of their rank than
            simulated.
        regime: a description of the link regime of the simulation; empty if it is unknown.
        batches: the number of overlapping batches in the measured timeline.
        name: the name of the simulated timeline: "predicted" if it was simulated before the step ran, or "replayed" if
            it was simulated with recorded times.
    """

    makespan: tuple[int, int]
    bubble: tuple[tuple[float, float], ...]
    medians: dict[tuple[Kind, int], tuple[float, float]]
    moved: float
    regime: str = ""
    batches: int = 1
    name: str = "predicted"

    @property
    def error(self) -> float:
        """The simulated makespan divided by the measured one, minus 1. For example, 0.03 means 3 % too long."""
        return self.makespan[0] / self.makespan[1] - 1 if self.makespan[1] else 0.0

    def __str__(self) -> str:
        name = self.name
        simulated, measured = map(seconds_text, self.makespan)
        lines = [f"makespan {simulated} {name}, {measured} measured ({self.error:+.1%})"]
        if self.batches > 1:
            simulated, measured = (seconds_text(makespan / self.batches) for makespan in self.makespan)
            lines.append(f"{self.batches} batches that overlap: {simulated} {name}, {measured} measured for each")
        if self.regime:
            lines.append(f"{name} with {self.regime}")
        if self.moved:
            lines.append(f"{self.moved:.0%} of the computations ran in another order than {name}")
        lines += [f"rank {r}: bubble {p:.1%} {name}, {m:.1%} measured" for r, (p, m) in enumerate(self.bubble)]
        for (kind, stage), (p, m) in sorted(self.medians.items()):
            if not p:  # optimizer steps, which predictions leave out
                continue
            ratio = f" ({p / m - 1:+.1%})" if m else ""
            lines.append(f"{kind}{stage}: {seconds_text(p)} {name}, {seconds_text(m)} measured{ratio}")
        return "\n".join(lines)


def compare_timelines(predicted: Timeline, measured: Timeline) -> TimelineComparison:
    """Compare the makespan, the bubbles, the medians of every kind, and the order of two timelines.

    Args:
        predicted: the simulated timeline. Its name is used in texts, if it has one.
        measured: the measured timeline.
    """
    medians = [_compute_medians(t) for t in (predicted, measured)]
    moved = total = 0
    for row, other in zip(predicted.program().head, measured.program().head, strict=False):
        total += len(other)
        moved += sum(a != b for a, b in zip(row, other, strict=False)) + abs(len(row) - len(other))
    return TimelineComparison(
        (predicted.makespan, measured.makespan),
        tuple(zip(predicted.bubble, measured.bubble, strict=False)),
        {key: (medians[0][key], medians[1][key]) for key in medians[0] if key in medians[1]},
        moved / total if total else 0.0,
        predicted.regime,
        measured.batches,
        predicted.name or "predicted",
    )


def _compute_medians(timeline: Timeline) -> dict[tuple[Kind, int], float]:
    times: dict[tuple[Kind, int], list[int]] = defaultdict(list)
    for e in timeline.events:
        times[e.instruction.kind, e.instruction.stage].append(e.end - e.start)
    return {key: median(values) for key, values in times.items()}


MIN_UNEVEN_RATIO = 1.1
"""A stage or link is slow if its time divided by the time of the others is at least this ratio."""


@dataclass(frozen=True)
class BottleneckRank:
    """The rank with the longest computing time, without optimizer steps.

    Attributes:
        rank: the rank.
        stages: the stages of the rank.
        ratio: the time of the rank divided by the median time of the other ranks; 1 if there are no other ranks.
        others: "the others", "the other", or an empty string if there are no other ranks.
        by_stage: the computing time of each stage for a batch in seconds.
        link: the (from rank, to rank) of the busiest link; None if no messages are sent.
    """

    rank: int
    stages: tuple[int, ...]
    ratio: float
    others: str
    by_stage: tuple[float, ...]
    link: tuple[int, int] | None

    @classmethod
    def from_timeline(cls, timeline: Timeline) -> BottleneckRank:
        """Return the slowest rank of `timeline`."""
        plan = timeline.plan
        seconds = [0.0] * plan.n_stages
        for e in timeline.computations:
            if e.instruction.kind is not Kind.STEP:
                seconds[e.instruction.stage] += (e.end - e.start) / 1e9 / timeline.batches
        by_rank = [sum(seconds[s] for s in stages) for stages in plan.stages]
        rank = max(range(plan.n_ranks), key=lambda r: by_rank[r])
        others = [t for r, t in enumerate(by_rank) if r != rank]
        usual = median(others) if others else 0.0
        busy = timeline.link_busy
        return cls(
            rank,
            plan.stages[rank],
            by_rank[rank] / usual if usual > 0 else 1.0,
            ("", "the other", "the others")[min(2, len(others))],
            tuple(seconds),
            max(busy, key=lambda pair: busy[pair]) if busy else None,
        )

    @property
    def is_uneven(self) -> bool:
        """Whether the rank is clearly slower than the others."""
        return self.ratio >= MIN_UNEVEN_RATIO

    @property
    def name(self) -> str:
        """The name of the stage, such as "stage 2", or of its rank with all stages, such as "rank 2 (stages 2, 6)"."""
        if len(self.stages) == 1:
            return f"stage {self.stages[0]}"
        return f"rank {self.rank} (stages {', '.join(map(str, self.stages))})"

    def __str__(self) -> str:
        if not self.others:
            return "There is one rank only"
        name = self.name[0].upper() + self.name[1:]
        if self.is_uneven:
            return f"{name} takes {self.ratio:.2g}x the time of {self.others}"
        return f"No stage is slow: {self.name} takes {self.ratio:.3g}x the time of {self.others}"
