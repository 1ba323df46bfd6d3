"""What ran when: the one type that the simulator predicts and the engine records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from lightning_pipes.ir import COMPUTE, Instruction, Plan


class Event(NamedTuple):
    """One instruction on one rank, in nanoseconds from the start of the timeline.

    A transfer runs from the moment its link starts to move it until its last byte is there; it is listed under the
    sending rank, with the instruction of the send.
    """

    rank: int
    instruction: Instruction
    start: int
    end: int


@dataclass(frozen=True)
class Timeline:
    """Events of one window, sorted by start.

    Attributes:
        events: computations and transfers.
        peak_bytes: most bytes held by each rank, where known.
        name: what it shows, for titles.
    """

    events: tuple[Event, ...]
    plan: Plan
    peak_bytes: tuple[int, ...] = ()
    name: str = ""
    attributes: dict[str, str] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, events: Iterable[Event], plan: Plan, **more: object) -> Timeline:
        """The timeline of `events`, sorted and moved so that the first one starts at 0."""
        ordered = sorted(events, key=lambda e: (e.start, e.end, e.rank))
        origin = ordered[0].start if ordered else 0
        moved = tuple(e._replace(start=e.start - origin, end=e.end - origin) for e in ordered)
        return cls(moved, plan, **more)  # type: ignore[arg-type]

    @cached_property
    def makespan(self) -> int:
        """Nanoseconds from the first start to the last end."""
        return max((e.end for e in self.events), default=0)

    @cached_property
    def busy(self) -> tuple[int, ...]:
        """Nanoseconds that each rank computes."""
        busy = [0] * self.plan.n_ranks
        for e in self.events:
            if e.instruction.kind in COMPUTE:
                busy[e.rank] += e.end - e.start
        return tuple(busy)

    @property
    def bubble(self) -> tuple[float, ...]:
        """The share of the makespan that each rank idles, 0 to 1."""
        return tuple(1 - b / self.makespan if self.makespan else 0.0 for b in self.busy)

    @property
    def efficiency(self) -> float:
        """Busy time of the slowest rank over the makespan, 0 to 1."""
        return max(self.busy) / self.makespan if self.makespan else 0.0
