"""Compare simulated with measured timelines."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median

from lightning_pipes.cost.units import seconds_text
from lightning_pipes.ir import Kind
from lightning_pipes.sim.timeline import Timeline


@dataclass(frozen=True)
class TimelineComparison:
    """Two timelines of the same work.

    Attributes:
        makespan: nanoseconds, simulated and measured.
        bubble: of each rank, simulated and measured, 0 to 1.
        medians: nanoseconds by (kind, stage), simulated and measured, of the kinds that both have.
        moved: computations that a rank ran at another place of its order than simulated, as a share of all, 0 to 1.
        regime: the link regime of the simulation, in words; empty where it is unknown.
        batches: of the measured one, which overlap.
        name: what the simulated one is: "predicted" before the step ran, or "replayed" from what was recorded.
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
        """Simulated makespan over the measured one, less 1: 0.03 is 3 % too long."""
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
            if not p:  # optimizers' part, which predictions leave out
                continue
            ratio = f" ({p / m - 1:+.1%})" if m else ""
            lines.append(f"{kind}{stage}: {seconds_text(p)} {name}, {seconds_text(m)} measured{ratio}")
        return "\n".join(lines)


def compare_timelines(predicted: Timeline, measured: Timeline) -> TimelineComparison:
    """Compare makespan, bubbles, medians of every kind and order of two timelines.

    Args:
        predicted: simulated; texts call it by its name, if it has one.
    """
    medians = [_medians(t) for t in (predicted, measured)]
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


def _medians(timeline: Timeline) -> dict[tuple[Kind, int], float]:
    times: dict[tuple[Kind, int], list[int]] = defaultdict(list)
    for e in timeline.events:
        times[e.instruction.kind, e.instruction.stage].append(e.end - e.start)
    return {key: median(values) for key, values in times.items()}


UNEVEN = 1.1
"""A stage or link that takes so much longer than the others is slow."""


@dataclass(frozen=True)
class BottleneckRank:
    """The rank that computes longest, optimizer steps left out.

    Attributes:
        rank: the rank.
        stages: those that it holds.
        ratio: its time over the median of the other ranks'; 1 where there are none.
        others: "the others", "the other", or nothing where there is no other rank.
        by_stage: seconds that each stage computes for a batch.
        link: the (from rank, to rank) that is busy longest; None where nothing is sent.
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
        return self.ratio >= UNEVEN

    @property
    def name(self) -> str:
        """ "stage 2", or "rank 2 (stages 2, 6)" where it holds several."""
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
