"""Where the time of one window went, from a few numbers of each rank: cheap enough to ask while training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from lightning_pipes.ir import COMPUTE, Kind
from lightning_pipes.sim.timeline import Event

_IDLE = ("pipeline/bubble", "pipeline/efficiency")
"""Values that say nothing of a rank that computes for others meanwhile."""


class Share(NamedTuple):
    """The time of one rank in a window.

    Attributes:
        took: nanoseconds from its first instruction to the end of its last.
        stages: nanoseconds of each stage.
        batches: their number.
        steps: nanoseconds of optimizer steps, where the schedule orders them.
    """

    took: int
    stages: dict[int, int]
    batches: int
    steps: int = 0

    @classmethod
    def from_events(cls, events: Iterable[Event]) -> Share:
        """Return the share of one rank by its events."""
        first, last, stages, batches, steps = None, 0, dict[int, int](), 1, 0
        for _, i, start, end in events:
            if i.kind in COMPUTE:
                first = start if first is None or start < first else first
                last, batches = max(last, end), max(batches, i.batch + 1)
                if i.kind is Kind.STEP:
                    steps += end - start
                else:
                    stages[i.stage] = stages.get(i.stage, 0) + end - start
        return cls(last - first if first is not None else 0, stages, batches, steps)


@dataclass(frozen=True)
class Timing:
    """One window on all ranks.

    Attributes:
        seconds: of a batch, on the rank that took longest from its first instruction to its last. Clocks are not
            compared; the rank of the first stage begins first and ends last.
        bubble: the mean share of the time in which ranks idle, 0 to 1; optimizer steps that the schedule orders are
            work, as in `Timeline.bubble`.
        efficiency: the busiest rank's share, 0 to 1, as `Timeline.efficiency`.
        slowest: the first stage of the busiest rank.
        ratio: the busiest rank's time over the median of the others'; 1 where there are none.
        alone: whether what is idle in it was idle, and not busy for siblings of a job array.
    """

    seconds: float
    bubble: float
    efficiency: float
    slowest: int
    ratio: float
    alone: bool = True

    @classmethod
    def from_shares(cls, shares: Sequence[Share], alone: bool = True) -> Timing:
        """Return the timing from the shares of all ranks, in their order."""
        busy = [sum(share.stages.values()) for share in shares]
        took = max(1, *(share.took for share in shares))
        worked = [stages + share.steps for stages, share in zip(busy, shares, strict=True)]
        most = max(range(len(busy)), key=lambda rank: busy[rank])
        others = [b for rank, b in enumerate(busy) if rank != most]
        usual = median(others) if others else 0
        return cls(
            took / 1e9 / max(share.batches for share in shares),
            1 - sum(worked) / (len(worked) * took),
            max(worked) / took,
            min(shares[most].stages, default=0),
            busy[most] / usual if usual else 1.0,
            alone,
        )

    @property
    def metrics(self) -> dict[str, float]:
        """Return metrics by logged name; no bubble and no efficiency with siblings."""
        found = {
            "pipeline/step_ms": 1e3 * self.seconds,
            "pipeline/bubble": self.bubble,
            "pipeline/efficiency": self.efficiency,
            "pipeline/slowest_stage": float(self.slowest),
            "pipeline/slowest_ratio": self.ratio,
        }
        return found if self.alone else {k: v for k, v in found.items() if k not in _IDLE}
