"""The costs of a run, measured during training: moving averages of the events that every step records anyway."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import fmean, median, pstdev
from typing import NamedTuple

from lightning_pipes.cost import CostModel, ModelProfile, Table
from lightning_pipes.cost.measurement import dispatch_delays, input_queues, times_of_passes
from lightning_pipes.ir import COMPUTE_KINDS, SEND_KINDS, Instruction, Kind, Plan, Span, layer_passes, target_stage

Key = tuple[Kind, int, int]
"""The kind, stage and number of rows of an operation."""
WINDOW_STEPS = 5
"""The number of steps over which transfers are averaged (W in Ada-Grouper)."""
MIN_AVERAGE_CHANGE = 0.05
"""The relative change of its average above which the stored time of a computation is replaced."""


class StepSample(NamedTuple):
    """Statistics of one step of one rank.

    Attributes:
        means: the mean nanoseconds of each pass that the rank computed and of each transfer that it received, by kind,
            stage and number of rows. A transfer has the kind and stage of its send.
        spread: the standard deviation of the transfers divided by their mean.
        lag: the median nanoseconds between the time when a computation is ready and its start.
        impossible: the number of transfers that were discarded because their timestamps contradict each other, by the
            stage before the link.
        took: the nanoseconds from the start of the first computation of the rank to the end of its last event.
        slack: the length of the shortest queue of arrived inputs at a launch while the pipeline was full; None if there
            was no such launch.
        stalled: the nanoseconds for which the rank waited for inputs; None if it received no inputs.
    """

    means: dict[Key, float]
    spread: dict[Key, float]
    lag: float
    impossible: Mapping[int, int]
    took: int
    slack: int | None = None
    stalled: int | None = None

    @classmethod
    def from_events(
        cls, events: Sequence[tuple[int, Instruction, int, int]], plan: Plan, since: int = 0, chosen: bool = False
    ) -> StepSample:
        """Return the sample of one rank in one window. Transfers belong to their receivers.

        The sender and the receiver of a message each record a timestamp with their own clock. If one of the clocks
        jumps, a message may seem to arrive before it was sent, or to be sent before the window began. Such transfers
        are discarded.

        Args:
            events: the events of the rank; each has the rank, the instruction, and its start and end in nanoseconds.
            plan: the plan that ran.
            since: the end of the last backward of this rank before the window, by the same clock. A rank may already
                receive messages while it still updates its weights.
            chosen: whether a policy determines the order. A policy may delay a forward that is ready, so forwards are
                then ignored in `lag`.
        """
        durations: dict[Key, list[float]] = defaultdict(list)
        impossible: Counter[int] = Counter()
        for _, i, start, end in events:
            if i.kind in SEND_KINDS and not since <= start < end:
                impossible[min(_find_edge(i.kind, i.stage))] += 1
            elif i.kind in SEND_KINDS:
                durations[i.kind, i.stage, i.span.rows].append(end - start)
        computed = [(i, end - start, plan) for _, i, start, end in events if i.kind in COMPUTE_KINDS - {Kind.STEP}]
        for (kind, stage), by in times_of_passes(computed).items():
            durations |= {(kind, stage, rows): times for rows, times in by.items()}
        recorded = _Recorded(plan, events)
        waited = dispatch_delays(recorded, COMPUTE_KINDS - {Kind.F} if chosen else COMPUTE_KINDS)
        queues = input_queues(recorded)
        means = {key: fmean(found) for key, found in durations.items()}
        return cls(
            means,
            {
                key: pstdev(found) / means[key]
                for key, found in durations.items()
                if key[0] in SEND_KINDS and means[key]
            },
            median(waited) if waited else 0.0,
            impossible,
            max((e[3] for e in events), default=0)
            - min((e[2] for e in events if e[1].kind in COMPUTE_KINDS), default=0),
            min((q.slack for q in queues if q.slack is not None), default=None),
            sum(sum(q.stalled) for q in queues) if queues else None,
        )


class _Recorded(NamedTuple):
    plan: Plan
    events: Sequence[tuple[int, Instruction, int, int]]


@dataclass
class Averages:
    """The costs of a run, averaged over its latest steps.

    Transfers are averaged over the last `window` steps that contain any. If the timestamps of some transfers contradict
    each other, all transfers of this link are discarded for the step, in both directions: when a clock jumps, the
    messages in one direction seem to arrive before they are sent, and the messages in the other direction seem to take
    too long.

    The network does not affect computations. Their times are averaged over the first `window` steps without the very
    first step, and this average is reused until the average of the last `window` steps differs from it by more than
    `drift`.

    Attributes:
        window: the number of steps over which times are averaged.
        drift: the relative change above which the stored time of a computation is replaced.
        latency: the seconds of empty messages, by (sending stage, receiving stage), as far as they were measured.
        parts: for each stage, the times of input gradients (I) and weight gradients (W) as shares of a whole backward,
            if the layers were measured in both ways. They convert times of a whole backward into times of its parts,
            and vice versa.
    """

    window: int = WINDOW_STEPS
    drift: float = MIN_AVERAGE_CHANGE
    latency: Mapping[tuple[int, int], float] = field(default_factory=dict)
    parts: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    _own: dict[int, tuple[float, float]] = field(default_factory=dict)
    _recent: dict[Key, deque[float]] = field(default_factory=dict)
    _known: dict[Key, float] = field(default_factory=dict)
    _settled: set[Key] = field(default_factory=set)
    _spread: dict[Key, float] = field(default_factory=dict)
    _lag: deque[float] = field(default_factory=deque)
    _slack: deque[int] = field(default_factory=deque)
    _stalled: deque[float] = field(default_factory=deque)
    impossible: int = 0
    """The number of transfers of the last step that were discarded."""
    drifted: tuple[Key, ...] = ()
    """The computations whose times have drifted, so that the last step replaced the stored time."""

    def add(self, step: Iterable[StepSample]) -> None:
        """Add one step.

        Args:
            step: the samples of all ranks.
        """
        samples = list(step)
        self.drifted, self.impossible = (), sum(sum(sample.impossible.values()) for sample in samples)
        jumped = {edge for sample in samples for edge in sample.impossible}
        step_lags = []
        for sample in samples:
            step_lags.append(sample.lag)
            for key, mean in sample.means.items():
                kind, stage, _ = key
                if kind in SEND_KINDS and min(_find_edge(kind, stage)) in jumped:
                    continue
                self._add(key, mean)
                if key in sample.spread:
                    self._spread[key] = sample.spread[key]
        self._lag.append(median(step_lags) if step_lags else 0.0)
        if len(self._lag) > self.window:
            self._lag.popleft()
        known = [sample.slack for sample in samples if sample.slack is not None]
        shares = [sample.stalled / sample.took for sample in samples if sample.stalled is not None and sample.took]
        for kept, found in ((self._slack, known), (self._stalled, shares)):
            if found:
                kept.append(min(found))  # type: ignore[arg-type]
            if len(kept) > self.window:
                kept.popleft()

    @property
    def lag(self) -> float:
        """The seconds between the time when a computation is ready and its start, as a median over ranks and steps."""
        return median(self._lag) / 1e9 if self._lag else 0.0

    @property
    def unsteadiness(self) -> float:
        """The largest variation of the transfers of a link within a step, as standard deviation divided by mean."""
        return max(self._spread.values(), default=0.0)

    @property
    def slack(self) -> int | None:
        """The smallest number of inputs that waited at a launch while the pipeline was full, in the last steps.

        The value covers the last `window` steps with such a launch, and is None if there was none.
        """
        return min(self._slack, default=None)

    @property
    def stalled(self) -> float | None:
        """The share of a step for which the rank that stalled least waited for inputs; the maximum of the last steps.

        The value is None if no rank received inputs.
        """
        return max(self._stalled, default=None)

    def has_measured(self, plan: Plan) -> bool:
        """Return whether times were measured for all sizes of micro-batches in `plan`.

        Otherwise, costs are extrapolated.
        """
        return all(
            (kind, s, rows) in self._known
            for s in range(plan.n_stages)
            for kind in _list_kinds(plan, s)
            for rows in _list_sizes(plan, kind, s)
        )

    def costs(self, base: CostModel | None = None, overhead: bool = True) -> CostModel:
        """Return a cost model with these averages.

        If only one size of an operation was measured, other sizes are extrapolated: computations in proportion to their
        samples, and transfers as the latency plus a part in proportion to their samples. With several measured sizes,
        times are interpolated and extrapolated linearly.

        Args:
            base: provides the bytes, and the times of operations that were not measured.
            overhead: whether the lag counts as overhead before each computation.
        """
        points: dict[tuple[Kind, int], dict[int, float]] = defaultdict(dict)
        for (kind, stage, rows), mean in self._known.items():
            points[kind, stage][rows] = mean / 1e9
        for (kind, stage), known in points.items():
            if len(known) == 1:
                ((rows, seconds),) = known.items()
                known[0] = min(self.latency.get(_find_edge(kind, stage), 0.0), seconds) if kind in SEND_KINDS else 0.0
        tables: dict[tuple[Kind, int], Table] = {key: tuple(sorted(known.items())) for key, known in points.items()}
        for stage, parts in {**self.parts, **self._own}.items():
            tables = _other_way(tables, stage, parts) | tables
        base = base or CostModel({})
        steady = {pair: replace(link, burst=0.0, latency=0.0) for pair, link in base.links.items()}
        return replace(
            base,
            seconds={**base.seconds, **tables},
            overhead=self.lag if overhead else 0.0,
            link=replace(base.link, burst=0.0, latency=0.0),
            links=steady,
        )

    def _add(self, key: Key, mean: float) -> None:
        recent = self._recent.get(key)
        if recent is None:
            recent = self._recent[key] = deque(maxlen=self.window)
            if (
                key[0] not in SEND_KINDS
            ):  # the first execution includes one-time work such as allocations and filling caches
                self._known[key] = mean
                return
        recent.append(mean)
        average = fmean(recent)
        if key[0] in SEND_KINDS or key not in self._settled:
            self._known[key] = average
            if len(recent) == self.window:
                self._settled.add(key)
        elif abs(average - self._known[key]) > self.drift * self._known[key]:
            self._forget_other_way(key)
            self._known[key] = average
            self._settled.discard(key)
            recent.clear()
            self.drifted = (*self.drifted, key)

    def _forget_other_way(self, key: Key) -> None:
        """Discard the times of the form of backward, whole or split, that no longer runs, if the other form drifted.

        The discarded times are replaced by the new times of the running form, scaled by the ratio in which both were
        measured.
        """
        kind, stage, rows = key
        known = [self._known.get((each, stage, rows), 0.0) for each in (Kind.B, Kind.I, Kind.W)]
        if kind is Kind.F or not all(known[:1]) or not any(known[1:]):
            return
        whole, *parts = known
        self._own[stage] = parts[0] / whole, parts[1] / whole
        for each in (Kind.I, Kind.W) if kind is Kind.B else (Kind.B,):
            self._known.pop((each, stage, rows), None)
            self._recent.pop((each, stage, rows), None)
            self._settled.discard((each, stage, rows))


def parts_of(profile: ModelProfile | None, layers: Sequence[Span]) -> dict[int, tuple[float, float]]:
    """Return the times of I and W as shares of a whole backward, by stage, for the largest measured micro-batch.

    The result is empty if the two parts were not measured. The first stage computes no input gradients, so its whole
    backward is W.
    """
    if profile is None or not profile.has_split:
        return {}
    costs, rows = profile.stage_costs(layers), profile.layers[0].forward[-1][0]
    found = {0: (0.0, 1.0)}
    for s in range(1, len(layers)):
        whole = costs.seconds_at(Kind.B, s, rows)
        found[s] = (
            (costs.seconds_at(Kind.I, s, rows) / whole, costs.seconds_at(Kind.W, s, rows) / whole)
            if whole
            else (0.0, 1.0)
        )
    return found


def _other_way(
    tables: Mapping[tuple[Kind, int], Table], stage: int, parts: tuple[float, float]
) -> dict[tuple[Kind, int], Table]:
    """Return the times of the whole backward of a stage computed from its parts, or vice versa."""
    whole = tables.get((Kind.B, stage), ())
    found = {(kind, stage): _scale_times(whole, share) for kind, share in zip((Kind.I, Kind.W), parts, strict=True)}
    total = parts[0] + parts[1]
    if not whole and total:
        both = zip(tables.get((Kind.I, stage), ()), tables.get((Kind.W, stage), ()), strict=False)
        found = {(Kind.B, stage): tuple((rows, (i + w) / total) for (rows, i), (_, w) in both)}
    return {key: table for key, table in found.items() if table}


def _scale_times(table: Table, share: float) -> Table:
    return tuple((rows, seconds * share) for rows, seconds in table)


def _list_kinds(plan: Plan, stage: int) -> list[Kind]:
    """Return the kinds of computations and messages of `stage`."""
    kinds = [*plan.kinds_of_stage(stage)]
    if stage + 1 < plan.n_stages and plan.is_remote_edge(stage):
        kinds.append(Kind.SF)
    if stage and plan.is_remote_edge(stage - 1):
        kinds.append(Kind.SB)
    return kinds


@lru_cache(maxsize=64)
def _list_sizes(plan: Plan, kind: Kind, stage: int) -> frozenset[int]:
    """Return the numbers of rows for which operations of this kind and stage need times."""
    every = [Instruction(kind, stage, span=span) for span in plan.spans(kind, stage)]
    if kind in SEND_KINDS:
        return frozenset(i.span.rows for i in every)
    return frozenset(rows for i in every for rows, _ in layer_passes(i, plan))


def _find_edge(kind: Kind, stage: int) -> tuple[int, int]:
    return stage, target_stage(kind, stage)
