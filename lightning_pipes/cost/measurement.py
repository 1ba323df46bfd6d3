"""Costs derived from recorded timelines: medians by size, their scatter, and the times of single operations."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from statistics import fmean, median
from typing import NamedTuple, Protocol, runtime_checkable

from lightning_pipes.cost.layer import Table, at_rows
from lightning_pipes.ir import (
    COMPUTE_KINDS,
    RECEIVE_KINDS,
    RECOMPUTE_KINDS,
    SEND_KINDS,
    Instruction,
    Kind,
    Pass,
    Plan,
    layer_passes,
    needs,
    send_of,
)

Latency = Callable[[Instruction, Plan], int]
"""A function that returns the nanoseconds of a send during which it does not occupy its link."""


@runtime_checkable
class RecordedTimeline(Protocol):
    """A recorded run, such as a `Timeline`, from which a cost model can be measured."""

    @property
    def plan(self) -> Plan:
        """The plan that was executed."""

    @property
    def events(self) -> Sequence[tuple[int, Instruction, int, int]]:
        """Tuples of (rank, instruction, start, end) in nanoseconds.

        A send lasts from the start of the transfer to its arrival.
        """


class Measurement(NamedTuple):
    """Statistics of recorded timelines.

    Attributes:
        seconds: by kind and stage, the median seconds for each recorded number of rows. If only one number of rows was
            recorded, the table also has 0 seconds at 0 rows, except for a STEP.
        scatter: by kind and stage, the duration of each operation as a multiple of the median of operations with the
            same passes.
        overhead: the median seconds from the moment at which a computation becomes ready to its start, or None if this
            is unknown.
    """

    seconds: Mapping[tuple[Kind, int], Table]
    scatter: Mapping[tuple[Kind, int], tuple[float, ...]]
    overhead: float | None

    @classmethod
    def from_timelines(cls, timelines: Iterable[RecordedTimeline], latency: Latency) -> Measurement:
        """Return the statistics of the given timelines.

        Args:
            timelines: the recorded runs.
            latency: returns the nanoseconds to subtract from the duration of a send.
        """
        computed: list[tuple[Instruction, int, Plan]] = []
        sent: dict[tuple[Kind, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        by_passes: dict[tuple[Kind, int], dict[tuple[Pass, ...], list[float]]] = defaultdict(lambda: defaultdict(list))
        waited: list[int] = []
        for timeline in timelines:
            waited += dispatch_delays(timeline)
            for i, took in _occupancy_ns(timeline, latency):
                if i.kind in COMPUTE_KINDS:
                    computed.append((i, took, timeline.plan))
                    by_passes[i.kind, i.stage][tuple(layer_passes(i, timeline.plan))].append(took)
                else:
                    sent[i.kind, i.stage][i.span.rows].append(took)
                    by_passes[i.kind, i.stage][(Pass(i.span.rows, False),)].append(took)
        seen = {**times_of_passes(computed), **sent}
        tables = {key: {rows: median(times) / 1e9 for rows, times in by.items()} for key, by in seen.items()}
        for (kind, _), points in tables.items():
            if len(points) == 1 and kind is not Kind.STEP:
                points[0] = 0.0
        return cls(
            {key: tuple(sorted(points.items())) for key, points in tables.items()},
            {
                key: tuple(ratio for times in by.values() for ratio in _ratios_to_median(times))
                for key, by in by_passes.items()
            },
            median(waited) / 1e9 if waited else None,
        )


def operation_seconds(timeline: RecordedTimeline, latency: Latency) -> dict[Instruction, float]:
    """Return the seconds of each operation of a timeline, without the latency of sends."""
    return {i: took / 1e9 for i, took in _occupancy_ns(timeline, latency)}


def _occupancy_ns(timeline: RecordedTimeline, latency: Latency) -> Iterable[tuple[Instruction, int]]:
    """Yield the nanoseconds that each computation occupies its rank and that each message occupies its link."""
    for _, i, start, end in timeline.events:
        if i.kind in COMPUTE_KINDS:
            yield i, end - start
        elif i.kind in SEND_KINDS:
            yield i, max(0, end - start - latency(i, timeline.plan))


def _ratios_to_median(times: Sequence[float]) -> list[float]:
    usual = median(times)
    return [took / usual for took in times] if usual else [1.0] * len(times)


def times_of_passes(
    computed: Iterable[tuple[Instruction, float, Plan]],
) -> dict[tuple[Kind, int], dict[int, list[float]]]:
    """Return the nanoseconds of single passes through the layers.

    If a computation has several passes, its duration is divided in proportion to their samples. If a backward
    includes a recomputed forward, the median duration of the recorded forwards is subtracted.

    Args:
        computed: tuples of (computation, nanoseconds, plan).

    Returns:
        The durations by kind and stage, then by rows.
    """
    found: dict[tuple[Kind, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    later: list[tuple[Instruction, float, tuple[Pass, ...]]] = []

    def add_passes(i: Instruction, took: float, each: Sequence[Pass]) -> None:
        whole = sum(rows for rows, _ in each)
        for rows, _ in each:
            found[i.kind, i.stage][rows].append(took if len(each) == 1 else took * rows / whole)

    for i, took, plan in computed:
        each = layer_passes(i, plan)
        if i.kind is Kind.R:
            each = tuple(one for one in each if one.recompute)
        if i.kind in RECOMPUTE_KINDS and not plan.early_recompute and any(again for _, again in each):
            later.append((i, took, each))
        else:
            add_passes(i, took, each)
    forward: dict[int, Table] = {}
    for i, took, each in later:
        if i.stage not in forward:
            points = {rows: median(times) for rows, times in found[Kind.F, i.stage].items()}
            forward[i.stage] = tuple(sorted(({0: 0.0} | points if len(points) == 1 else points).items()))
        again = sum(at_rows(forward[i.stage], rows) for rows, runs_again in each if runs_again)
        add_passes(i, max(0.0, took - again), each)
    return {key: by for key, by in found.items() if by}


def dispatch_delays(timeline: RecordedTimeline, of: Set[Kind] = COMPUTE_KINDS) -> list[int]:
    """Return the nanoseconds from the moment at which each computation becomes ready to its start.

    A computation is ready when its inputs have arrived and its rank is free.

    Args:
        timeline: the recorded run.
        of: the kinds of computations to include.
    """
    arrivals = {i: end for _, i, _, end in timeline.events if i.kind in SEND_KINDS}
    free: dict[int, int] = {}
    found = []
    for rank, i, start, end in sorted(timeline.events, key=lambda e: e[2]):
        if i.kind in COMPUTE_KINDS:
            inputs = [arrivals.get(send_of(n), 0) for n in needs(i, timeline.plan) if n.kind in RECEIVE_KINDS]
            if i.kind in of and (rank in free or inputs):
                found.append(max(0, start - max(free.get(rank, 0), *inputs, 0)))
            free[rank] = end
    return found


class InputQueue(NamedTuple):
    """The queue of inputs at one stage, at each moment when its rank becomes free (Ada-Grouper, S4.4).

    A rank becomes free for the next computation when the previous computation ends. If the queue is empty at this
    moment, the rank stalls.

    Attributes:
        kind: F for activations, B for gradients.
        stage: the stage that consumes the inputs.
        lengths: for each launch, the number of inputs that have arrived and are not yet consumed.
        stalled: for each launch, the nanoseconds that the rank waited for the input.
        steady: the indices of the launches between the first backward and the last forward of the stage, when the
            pipeline neither fills nor drains.
    """

    kind: Kind
    stage: int
    lengths: tuple[int, ...]
    stalled: tuple[int, ...]
    steady: tuple[int, ...]

    @property
    def slack(self) -> int | None:
        """The length of the shortest queue among the steady launches, or None if there are no steady launches."""
        return min((self.lengths[n] for n in self.steady), default=None)

    @property
    def empty(self) -> int:
        """The number of launches that found an empty queue."""
        return self.lengths.count(0)

    @property
    def mean(self) -> float:
        """The mean length of the queue."""
        return fmean(self.lengths)


def input_queues(timeline: RecordedTimeline) -> tuple[InputQueue, ...]:
    """Return the input queues of all stages that receive messages, sorted by direction and stage."""
    plan, arrived = timeline.plan, defaultdict[tuple[Kind, int], list[int]](list)
    arrivals = {i: end for _, i, _, end in timeline.events if i.kind in SEND_KINDS}
    for i, end in arrivals.items():
        arrived[(Kind.F, i.stage + 1) if i.kind is Kind.SF else (Kind.B, i.stage - 1)].append(end)
    for times in arrived.values():
        times.sort()
    consumed: dict[tuple[Kind, int], set[Instruction]] = defaultdict(set)
    begin = min((e[2] for e in timeline.events), default=0)
    free: dict[int, int] = {}
    found: dict[tuple[Kind, int], list[tuple[int, int, int]]] = defaultdict(list)
    first, last = dict[int, int](), dict[int, int]()
    computed = sorted((e for e in timeline.events if e[1].kind in COMPUTE_KINDS), key=lambda e: e[2])
    for rank, i, start, end in computed:
        if i.kind is Kind.F:
            last[i.stage] = start
        elif i.kind not in (Kind.R, Kind.STEP):
            first.setdefault(i.stage, start)
        key = (Kind.F if i.kind is Kind.F else Kind.B, i.stage)
        inputs = {n for n in needs(i, plan) if n.kind in RECEIVE_KINDS and send_of(n) in arrivals}
        if inputs - consumed[key]:
            due = free.get(rank, begin)
            stalled = max(0, max(arrivals[send_of(n)] for n in inputs) - due)
            found[key].append((bisect_right(arrived[key], due) - len(consumed[key]), stalled, start))
            consumed[key] |= inputs
        free[rank] = end
    return tuple(
        InputQueue(
            *key,
            tuple(length for length, _, _ in launches),
            tuple(stalled for _, stalled, _ in launches),
            tuple(
                n
                for n, (_, _, start) in enumerate(launches)
                if first.get(key[1], start) <= start <= last.get(key[1], -1)
            ),
        )
        for key, launches in sorted(found.items())
    )
