"""Summarizes the time of one window from a few numbers per rank. This is cheap enough to be done during training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from lightning_pipes.ir import COMPUTE_KINDS, Kind
from lightning_pipes.sim.timeline import Event

_IDLE = ("pipeline/bubble", "pipeline/efficiency")
"""Metrics that are not meaningful if the ranks also compute for other siblings."""


class Share(NamedTuple):
    """The time of one rank in a window.

    Attributes:
        took: nanoseconds from the start of its first instruction to the end of its last.
        stages: nanoseconds of computation for each stage.
        batches: the number of batches in the window.
        steps: nanoseconds of optimizer steps, if the schedule orders them.
    """

    took: int
    stages: dict[int, int]
    batches: int
    steps: int = 0

    @classmethod
    def from_events(cls, events: Iterable[Event]) -> Share:
        """Compute the share of one rank from its events."""
        first, last, stages, batches, steps = None, 0, dict[int, int](), 1, 0
        for _, i, start, end in events:
            if i.kind in COMPUTE_KINDS:
                first = start if first is None or start < first else first
                last, batches = max(last, end), max(batches, i.batch + 1)
                if i.kind is Kind.STEP:
                    steps += end - start
                else:
                    stages[i.stage] = stages.get(i.stage, 0) + end - start
        return cls(last - first if first is not None else 0, stages, batches, steps)


@dataclass(frozen=True)
class Timing:
    """The timing of one window on all ranks.

    Attributes:
        seconds: seconds per batch, on the rank with the longest time from its first instruction to its last. The clocks
            of different ranks are not compared. The rank of the first stage begins first and ends last.
        bubble: the mean share of time in which ranks idle, from 0 to 1. Optimizer steps that the schedule orders count
            as work, as in `Timeline.bubble`.
        efficiency: the busy share of the busiest rank, from 0 to 1, as in `Timeline.efficiency`.
        slowest: the first stage of the busiest rank.
        ratio: the computing time of the busiest rank divided by the median of the other ranks. 1 if there are no other
            ranks.
        alone: whether the ranks do not compute for siblings of a job array in their idle time.
    """

    seconds: float
    bubble: float
    efficiency: float
    slowest: int
    ratio: float
    alone: bool = True

    @classmethod
    def from_shares(cls, shares: Sequence[Share], alone: bool = True) -> Timing:
        """Compute the timing from the shares of all ranks.

        Args:
            shares: the shares in the order of the ranks.
            alone: the value of the attribute `alone`.
        """
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
        """The metrics by the names under which they are logged.

        The bubble and the efficiency are left out for siblings.
        """
        found = {
            "pipeline/step_ms": 1e3 * self.seconds,
            "pipeline/bubble": self.bubble,
            "pipeline/efficiency": self.efficiency,
            "pipeline/slowest_stage": float(self.slowest),
            "pipeline/slowest_ratio": self.ratio,
        }
        return found if self.alone else {k: v for k, v in found.items() if k not in _IDLE}
