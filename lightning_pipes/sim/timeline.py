"""Timelines, of what ran when: the one type that the simulator predicts and the engine records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from lightning_pipes.cost.links import Regime, describe_regimes
from lightning_pipes.cost.measurement import InputQueue, input_queues
from lightning_pipes.cost.units import seconds_text
from lightning_pipes.ir import COMPUTE, SENDS, Instruction, Kind, Plan, Program


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
        regimes: of a prediction, those of the links on which messages take time; None for what was measured.
    """

    events: tuple[Event, ...]
    plan: Plan
    peak_bytes: tuple[int, ...] = ()
    name: str = ""
    attributes: dict[str, str] = field(default_factory=dict, hash=False)
    regimes: tuple[Regime, ...] | None = None

    @classmethod
    def from_events(cls, events: Iterable[Event], plan: Plan, **more: object) -> Timeline:
        """Return the timeline of `events`, sorted and moved so that the first one starts at 0."""
        ordered = sorted(events, key=lambda e: (e.start, e.end, e.rank))
        origin = ordered[0].start if ordered else 0
        moved = tuple(e._replace(start=e.start - origin, end=e.end - origin) for e in ordered)
        return cls(moved, plan, **more)  # type: ignore[arg-type]

    @classmethod
    def from_ranks(
        cls, by_rank: Sequence[Iterable[Event]], plan: Plan, offsets: Sequence[int] = (), **more: object
    ) -> Timeline:
        """Return one timeline from the events that each rank recorded, in nanoseconds of its own clock.

        `offsets[rank]` is added to that rank's times; without it all ranks are taken to share a clock.
        """
        moved = (
            [e._replace(start=e.start + offset, end=e.end + offset) for e in events] if offset else events
            for events, offset in zip(by_rank, offsets or (0,) * len(by_rank), strict=True)
        )
        return cls.from_events(chain.from_iterable(moved), plan, **more)

    @property
    def regime(self) -> str:
        """The world of a prediction, such as "asynchronous links"; empty for what was measured."""
        return "" if self.regimes is None else describe_regimes(self.regimes)

    @cached_property
    def makespan(self) -> int:
        """Nanoseconds from 0 to the last end."""
        return max((e.end for e in self.events), default=0)

    @cached_property
    def batches(self) -> int:
        """The number of batches; more than 1 where they overlap."""
        return 1 + max((e.instruction.batch for e in self.events), default=0)

    @property
    def step(self) -> float:
        """Nanoseconds of a step: of each batch its share of the makespan."""
        return self.makespan / self.batches

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
    def mean_bubble(self) -> float:
        """The bubble: the mean share of the makespan that ranks idle, 0 to 1."""
        return sum(self.bubble) / len(self.bubble)

    @property
    def efficiency(self) -> float:
        """Busy time of the slowest rank over the makespan, 0 to 1."""
        return max(self.busy) / self.makespan if self.makespan else 0.0

    @property
    def computations(self) -> tuple[Event, ...]:
        """The events that occupy ranks."""
        return tuple(e for e in self.events if e.instruction.kind in COMPUTE)

    @property
    def transfers(self) -> tuple[Event, ...]:
        """The events that occupy links."""
        return tuple(e for e in self.events if e.instruction.kind in SENDS)

    def target_rank(self, transfer: Event) -> int:
        """Return the rank that `transfer` goes to."""
        return self.plan.target_rank(transfer.instruction)

    @cached_property
    def link_busy(self) -> dict[tuple[int, int], int]:
        """Nanoseconds during which something was under way, by (from rank, to rank); latency counts."""
        busy: dict[tuple[int, int], int] = {}
        until: dict[tuple[int, int], int] = {}
        for e in self.transfers:
            link = (e.rank, self.target_rank(e))
            begun = max(e.start, until.get(link, 0))
            busy[link] = busy.get(link, 0) + max(0, e.end - begun)
            until[link] = max(e.end, until.get(link, 0))
        return busy

    @cached_property
    def input_queues(self) -> tuple[InputQueue, ...]:
        """The queues of arrived inputs at each launch, by direction and stage; empty where nothing is sent."""
        return input_queues(self)

    def program(self) -> Program:
        """Return the order in which the ranks computed: a finite program, without transfers."""
        rows: list[list[Instruction]] = [[] for _ in range(self.plan.n_ranks)]
        for e in self.computations:
            rows[e.rank].append(e.instruction)
        return Program(tuple(map(tuple, rows)))

    def gantt(self, width: int = 100) -> str:
        """Return a drawing in text, `width` characters for the makespan."""
        title = f"{self.name + ': ' if self.name else ''}{seconds_text(self.makespan)}"
        title += f", {self.regime}" if self.regimes else ""
        return gantt(self.plan, self.events, self.makespan, self.bubble, title, width)


_FILL = {Kind.F: "-", Kind.B: "=", Kind.I: "+", Kind.W: "~", Kind.STEP: "#"}


def gantt(
    plan: Plan, events: Sequence[Event], makespan: int, bubbles: Sequence[float], title: str, width: int = 100
) -> str:
    """Return the title, and one line a rank with its share of idle time: `width` characters for the makespan, a number
    where a micro-batch begins, dots where the rank idles. What is shorter than half a character is left out, labels
    that do not fit too."""
    labels = Labels(plan, events)
    scale = width / max(1, makespan)
    rows = [["."] * width for _ in range(plan.n_ranks)]
    used = set()
    for e in events:
        if e.instruction.kind not in COMPUTE:
            continue
        left = round(e.start * scale)
        long = round(e.end * scale) - left
        if not long:
            continue
        label = labels.label_of(e.instruction)
        fill = _FILL[e.instruction.kind]
        used.add(e.instruction.kind)
        fits = 1 < long >= len(label)
        rows[e.rank][left : left + long] = label.ljust(long, fill) if fits else fill * long
    digits = len(str(len(rows) - 1))
    lines = [title]
    for rank, (row, bubble) in enumerate(zip(rows, bubbles, strict=True)):
        lines.append(f"rank {rank:>{digits}} |{''.join(row)}| bubble {bubble:.1%}")
    lines.append(
        f"{'':{digits + 5}}  " + "  ".join([f"{_FILL[k]} {WORDS[k]}" for k in _FILL if k in used] + [". idle"])
    )
    return "\n".join(lines)


WORDS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradients",
    Kind.W: "weight gradients",
    Kind.STEP: "step",
}


class Labels:
    """Micro-batch numbers, with job and batch where the events have several."""

    def __init__(self, plan: Plan, events: Sequence[Event]) -> None:
        self._plan = plan
        items = [(e.instruction.job, e.instruction.batch) for e in events]
        self._jobs = any(job for job, _ in items)
        self._batches = any(batch for _, batch in items)

    def label_of(self, i: Instruction) -> str:
        """`3` is the fourth micro-batch, `3'` on its rank's second stage, `b3` of job 1, `2.3` of batch 2."""
        if i.kind is Kind.STEP:
            return "S"
        spans = self._plan.spans(i.kind, i.stage, i.job)
        number = str(spans.index(i.span)) if i.span in spans else f"{i.span.start}:{i.span.stop}"
        if self._batches:
            number = str(i.batch) if len(spans) == 1 else f"{i.batch}.{number}"
        if self._jobs:
            letter = chr(ord("a") + i.job) if i.job < 26 else f"j{i.job}:"
            number = letter if len(spans) == 1 and not self._batches else letter + number
        return number + "'" * self.stage_index(i)

    def stage_index(self, i: Instruction) -> int:
        """Return which of its rank's stages `i` concerns, from 0."""
        return self._plan.stages[self._plan.ranks[i.stage]].index(i.stage)
