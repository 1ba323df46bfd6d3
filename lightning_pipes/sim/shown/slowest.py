"""Find the slowest rank of a timeline."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from lightning_pipes.ir import Kind
from lightning_pipes.sim.timeline import Timeline

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
