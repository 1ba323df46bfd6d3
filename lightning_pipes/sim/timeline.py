"""Timelines, which contain the time of every instruction. The simulator and the engine both produce this type."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from lightning_pipes.cost.links import Regime, describe_regimes
from lightning_pipes.cost.measurement import InputQueue, input_queues
from lightning_pipes.cost.units import seconds_text
from lightning_pipes.ir import COMPUTE_KINDS, SEND_KINDS, Instruction, Kind, Plan, Program


class Event(NamedTuple):
    """One instruction on one rank, in nanoseconds from the start of the timeline.

    A transfer lasts from the moment when its link starts to move the message until its last byte has arrived. It
    belongs to the sending rank and has the instruction of the send.

    Attributes:
        rank: the rank.
        instruction: the instruction.
        start: the start in nanoseconds.
        end: the end in nanoseconds.
    """

    rank: int
    instruction: Instruction
    start: int
    end: int


@dataclass(frozen=True)
class Timeline:
    """The events of one window, sorted by start.

    Attributes:
        events: the computations and transfers.
        plan: the plan that ran.
        peak_bytes: the largest number of bytes that each rank held, if known.
        name: a name for titles.
        attributes: further information for the user, by name.
        regimes: for a simulated timeline, the regimes of the links on which messages take time; None for a measured
            timeline.
    """

    events: tuple[Event, ...]
    plan: Plan
    peak_bytes: tuple[int, ...] = ()
    name: str = ""
    attributes: dict[str, str] = field(default_factory=dict, hash=False)
    regimes: tuple[Regime, ...] | None = None

    @classmethod
    def from_events(cls, events: Iterable[Event], plan: Plan, **more: object) -> Timeline:
        """Return the timeline of `events`, sorted and shifted so that the first event starts at 0."""
        ordered = sorted(events, key=lambda e: (e.start, e.end, e.rank))
        origin = ordered[0].start if ordered else 0
        moved = tuple(e._replace(start=e.start - origin, end=e.end - origin) for e in ordered)
        return cls(moved, plan, **more)  # type: ignore[arg-type]

    @classmethod
    def from_ranks(
        cls, by_rank: Sequence[Iterable[Event]], plan: Plan, offsets: Sequence[int] = (), **more: object
    ) -> Timeline:
        """Return one timeline from the events of all ranks.

        Args:
            by_rank: the events of each rank, in nanoseconds of its own clock.
            plan: the plan that ran.
            offsets: the nanoseconds to add to the times of each rank; by default all ranks share one clock.
            more: further fields of the timeline.
        """
        moved = (
            [e._replace(start=e.start + offset, end=e.end + offset) for e in events] if offset else events
            for events, offset in zip(by_rank, offsets or (0,) * len(by_rank), strict=True)
        )
        return cls.from_events(chain.from_iterable(moved), plan, **more)

    @property
    def regime(self) -> str:
        """The link regimes of a simulation in words, such as "asynchronous links"; empty for a measured timeline."""
        return "" if self.regimes is None else describe_regimes(self.regimes)

    @cached_property
    def makespan(self) -> int:
        """The nanoseconds from 0 to the last end."""
        return max((e.end for e in self.events), default=0)

    @cached_property
    def batches(self) -> int:
        """The number of batches. If there are several, they overlap."""
        return 1 + max((e.instruction.batch for e in self.events), default=0)

    @property
    def step(self) -> float:
        """The nanoseconds of a step: the makespan divided by the number of batches."""
        return self.makespan / self.batches

    @cached_property
    def busy(self) -> tuple[int, ...]:
        """The nanoseconds for which each rank computes."""
        busy = [0] * self.plan.n_ranks
        for e in self.events:
            if e.instruction.kind in COMPUTE_KINDS:
                busy[e.rank] += e.end - e.start
        return tuple(busy)

    @property
    def bubble(self) -> tuple[float, ...]:
        """The share of the makespan for which each rank idles, from 0 to 1."""
        return tuple(1 - b / self.makespan if self.makespan else 0.0 for b in self.busy)

    @property
    def mean_bubble(self) -> float:
        """The bubble of the pipeline: the mean share of the makespan for which ranks idle, from 0 to 1."""
        return sum(self.bubble) / len(self.bubble)

    @property
    def efficiency(self) -> float:
        """The busy time of the busiest rank divided by the makespan, from 0 to 1."""
        return max(self.busy) / self.makespan if self.makespan else 0.0

    @property
    def computations(self) -> tuple[Event, ...]:
        """The events that occupy ranks."""
        return tuple(e for e in self.events if e.instruction.kind in COMPUTE_KINDS)

    @property
    def transfers(self) -> tuple[Event, ...]:
        """The events that occupy links."""
        return tuple(e for e in self.events if e.instruction.kind in SEND_KINDS)

    def target_rank(self, transfer: Event) -> int:
        """Return the rank that receives `transfer`."""
        return self.plan.target_rank(transfer.instruction)

    @cached_property
    def link_busy(self) -> dict[tuple[int, int], int]:
        """The nanoseconds during which messages were in flight, including latency, by (from rank, to rank)."""
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
        """The queues of arrived inputs at each launch, by direction and stage; empty if no messages are sent."""
        return input_queues(self)

    def program(self) -> Program:
        """Return the order in which the ranks computed, as a finite program without transfers."""
        rows: list[list[Instruction]] = [[] for _ in range(self.plan.n_ranks)]
        for e in self.computations:
            rows[e.rank].append(e.instruction)
        return Program(tuple(map(tuple, rows)))

    def gantt(self, width: int = 100) -> str:
        """Return the timeline as text, with `width` characters for the makespan."""
        title = f"{self.name + ': ' if self.name else ''}{seconds_text(self.makespan)}"
        title += f", {self.regime}" if self.regimes else ""
        return format_gantt(self.plan, self.events, self.makespan, self.bubble, title, width)


_BAR_CHARACTERS = {Kind.F: "-", Kind.R: ":", Kind.B: "=", Kind.I: "+", Kind.W: "~", Kind.STEP: "#"}


def format_gantt(
    plan: Plan, events: Sequence[Event], makespan: int, bubbles: Sequence[float], title: str, width: int = 100
) -> str:
    """Return a timeline as text: a title, one line for each rank with its idle share, and a legend.

    A number marks the start of a micro-batch, and dots mark idle time. Events that are shorter than half a character
    and labels that do not fit are left out.

    Args:
        plan: the plan that ran.
        events: the events.
        makespan: the nanoseconds that the drawing covers.
        bubbles: the idle share of each rank, from 0 to 1.
        title: the first line.
        width: the number of characters for the makespan.
    """
    labels = Labels(plan, events)
    scale = width / max(1, makespan)
    rows = [["."] * width for _ in range(plan.n_ranks)]
    used = set()
    for e in events:
        if e.instruction.kind not in COMPUTE_KINDS:
            continue
        left = round(e.start * scale)
        long = round(e.end * scale) - left
        if not long:
            continue
        label = labels.label_of(e.instruction)
        fill = _BAR_CHARACTERS[e.instruction.kind]
        used.add(e.instruction.kind)
        fits = 1 < long >= len(label)
        rows[e.rank][left : left + long] = label.ljust(long, fill) if fits else fill * long
    digits = len(str(len(rows) - 1))
    lines = [title]
    for rank, (row, bubble) in enumerate(zip(rows, bubbles, strict=True)):
        lines.append(f"rank {rank:>{digits}} |{''.join(row)}| bubble {bubble:.1%}")
    lines.append(
        f"{'':{digits + 5}}  "
        + "  ".join([f"{_BAR_CHARACTERS[k]} {KIND_NAMES[k]}" for k in _BAR_CHARACTERS if k in used] + [". idle"])
    )
    return "\n".join(lines)


KIND_NAMES = {
    Kind.F: "forward",
    Kind.R: "recomputation",
    Kind.B: "backward",
    Kind.I: "input gradients",
    Kind.W: "weight gradients",
    Kind.STEP: "step",
}


class Labels:
    """Labels of events: the number of the micro-batch, with the job and the batch if the events have several."""

    def __init__(self, plan: Plan, events: Sequence[Event]) -> None:
        self._plan = plan
        items = [(e.instruction.job, e.instruction.batch) for e in events]
        self._jobs = any(job for job, _ in items)
        self._batches = any(batch for _, batch in items)

    def label_of(self, i: Instruction) -> str:
        """Return the label of an instruction.

        `3` is the fourth micro-batch, `3'` is the same on the second stage of the rank, `b3` belongs to job 1, and
        `2.3` belongs to batch 2.
        """
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
        """Return the position of the stage of `i` among the stages of its rank, from 0."""
        return self._plan.stages[self._plan.ranks[i.stage]].index(i.stage)
