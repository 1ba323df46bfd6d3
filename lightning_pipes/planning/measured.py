"""The measured costs of a run while it goes on: moving averages of what every step records anyway."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import fmean, median, pstdev
from typing import NamedTuple

from lightning_pipes.cost import CostModel, ModelProfile, Table
from lightning_pipes.cost.measurement import dispatch_delays, input_queues, times_of_passes
from lightning_pipes.ir import COMPUTE, SENDS, Instruction, Kind, Plan, Span, layer_passes, target_stage

Key = tuple[Kind, int, int]
"""Kind, stage and rows."""
WINDOW = 5
"""Steps over which transfers are averaged (Ada-Grouper's W)."""
DRIFT = 0.05
"""A computation's time is reused until its average has moved by more than this."""


class StepSample(NamedTuple):
    """One rank's step in a few numbers.

    Attributes:
        means: nanoseconds of what it computed, pass by pass, and of the transfers that it received, by kind, stage and
            rows; of a transfer, the kind and stage of its send.
        spread: of transfers, their standard deviation over their mean.
        lag: nanoseconds, the median of what passed before a computation although nothing was missing.
        impossible: how many transfers were left out, as their stamps contradict each other, by the stage before their
            link.
        took: nanoseconds from its first event to its last.
        slack: the shortest queue of arrived inputs at launches while the pipeline was full; None without such launches.
        stalled: nanoseconds that the rank waited for inputs; None where it received none.
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
        """Return the sample that one rank recorded in one window; transfers with their receivers.

        Sender and receiver stamp a message each by its own clock. If one of these jumps, a message arrives before it
        was sent, or was sent before the window began: such transfers say nothing.

        Args:
            since: when the rank's last backward before this window ended, by the same clock: a rank that still updates
                weights may get messages already.
            chosen: whether a policy orders, which may hold back a forward that has all it needs.
        """
        durations: dict[Key, list[float]] = defaultdict(list)
        impossible: Counter[int] = Counter()
        for _, i, start, end in events:
            if i.kind in SENDS and not since <= start < end:
                impossible[min(_edge(i.kind, i.stage))] += 1
            elif i.kind in SENDS:
                durations[i.kind, i.stage, i.span.rows].append(end - start)
        computed = [(i, end - start, plan) for _, i, start, end in events if i.kind in COMPUTE - {Kind.STEP}]
        for (kind, stage), by in times_of_passes(computed).items():
            durations |= {(kind, stage, rows): times for rows, times in by.items()}
        recorded = _Recorded(plan, events)
        waited = dispatch_delays(recorded, COMPUTE - {Kind.F} if chosen else COMPUTE)
        queues = input_queues(recorded)
        means = {key: fmean(found) for key, found in durations.items()}
        return cls(
            means,
            {key: pstdev(found) / means[key] for key, found in durations.items() if key[0] in SENDS and means[key]},
            median(waited) if waited else 0.0,
            impossible,
            max((e[3] for e in events), default=0) - min((e[2] for e in events if e[1].kind in COMPUTE), default=0),
            min((q.slack for q in queues if q.slack is not None), default=None),
            sum(sum(q.stalled) for q in queues) if queues else None,
        )


class _Recorded(NamedTuple):
    plan: Plan
    events: Sequence[tuple[int, Instruction, int, int]]


@dataclass
class Averages:
    """Costs of a run from its latest steps.

    Transfers are averaged over the last `window` steps in which there were any. Where stamps of some contradict each
    other, those of their link are left out for that step in both directions: what arrives before it is sent in one, as
    a clock has jumped, takes too long in the other. Computations are not disturbed by the
    network: they are averaged over their first `window` steps, without the very first, and that is reused until the
    last `window` steps say something else by more than `drift`.

    Attributes:
        latency: seconds of messages without content, by (from stage, to stage), where they were measured.
        parts: by stage, what input and weight gradients (I and W) take over a whole backward, where they were
            measured layers both ways. While a run does one, this prices the other.
    """

    window: int = WINDOW
    drift: float = DRIFT
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
    """Transfers of the last step that were left out."""
    drifted: tuple[Key, ...] = ()
    """Computations whose times were measured anew in the last step."""

    def add(self, step: Iterable[StepSample]) -> None:
        """Add a step: the samples of all ranks."""
        samples = list(step)
        self.drifted, self.impossible = (), sum(sum(sample.impossible.values()) for sample in samples)
        jumped = {edge for sample in samples for edge in sample.impossible}
        step_lags = []
        for sample in samples:
            step_lags.append(sample.lag)
            for key, mean in sample.means.items():
                kind, stage, _ = key
                if kind in SENDS and min(_edge(kind, stage)) in jumped:
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
        """Seconds before a computation although nothing is missing, as all ranks have it."""
        return median(self._lag) / 1e9 if self._lag else 0.0

    @property
    def unsteadiness(self) -> float:
        """How much the transfers of one link differ within a step, at most: standard deviation over mean."""
        return max(self._spread.values(), default=0.0)

    @property
    def slack(self) -> int | None:
        """The fewest inputs that waited at a launch while the pipeline was full, in the last `window` steps."""
        return min(self._slack, default=None)

    @property
    def stalled(self) -> float | None:
        """The share of a step in which the rank that stalled least waited for inputs, the most of the last steps."""
        return max(self._stalled, default=None)

    def has_measured(self, plan: Plan) -> bool:
        """Return whether all micro-batches of `plan` have sizes that were measured; else costs are extrapolated."""
        return all(
            (kind, s, rows) in self._known
            for s in range(plan.n_stages)
            for kind in _kinds(plan, s)
            for rows in _sizes(plan, kind, s)
        )

    def costs(self, base: CostModel | None = None, overhead: bool = True) -> CostModel:
        """Return the cost model of these averages; bytes are those of `base`.

        What was seen with one size only is extrapolated to others: computations in proportion to samples, transfers as
        latency and the rest in proportion. Between two sizes that were seen, and beyond them, the line through them.

        Args:
            overhead: whether the lag counts as overhead before each computation.
        """
        points: dict[tuple[Kind, int], dict[int, float]] = defaultdict(dict)
        for (kind, stage, rows), mean in self._known.items():
            points[kind, stage][rows] = mean / 1e9
        for (kind, stage), known in points.items():
            if len(known) == 1:
                ((rows, seconds),) = known.items()
                known[0] = min(self.latency.get(_edge(kind, stage), 0.0), seconds) if kind in SENDS else 0.0
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
            if key[0] not in SENDS:  # the first time includes what is done once: memory, caches
                self._known[key] = mean
                return
        recent.append(mean)
        average = fmean(recent)
        if key[0] in SENDS or key not in self._settled:
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
        """Have what does not run any more, as backward is split now or is whole again, priced by what runs and has
        drifted: in the proportion in which both were measured."""
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
    """Return the shares of I and W in a whole backward, by stage, of the largest measured micro-batch.

    The result is empty where the parts were not measured. The first stage has no input gradients, so all of its
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
    """Return times of whole backwards of a stage from their parts, or of the parts from the whole."""
    whole = tables.get((Kind.B, stage), ())
    found = {(kind, stage): _times(whole, share) for kind, share in zip((Kind.I, Kind.W), parts, strict=True)}
    total = parts[0] + parts[1]
    if not whole and total:
        both = zip(tables.get((Kind.I, stage), ()), tables.get((Kind.W, stage), ()), strict=False)
        found = {(Kind.B, stage): tuple((rows, (i + w) / total) for (rows, i), (_, w) in both)}
    return {key: table for key, table in found.items() if table}


def _times(table: Table, share: float) -> Table:
    return tuple((rows, seconds * share) for rows, seconds in table)


def _kinds(plan: Plan, stage: int) -> list[Kind]:
    """Return the instructions and messages of `stage`."""
    kinds = [*plan.compute_kinds]
    if stage + 1 < plan.n_stages and plan.is_remote_edge(stage):
        kinds.append(Kind.SF)
    if stage and plan.is_remote_edge(stage - 1):
        kinds.append(Kind.SB)
    return kinds


@lru_cache(maxsize=64)
def _sizes(plan: Plan, kind: Kind, stage: int) -> frozenset[int]:
    """Return the numbers of rows that plans of this cut need times for."""
    every = [Instruction(kind, stage, span=span) for span in plan.spans(kind, stage)]
    if kind in SENDS:
        return frozenset(i.span.rows for i in every)
    return frozenset(rows for i in every for rows, _ in layer_passes(i, plan))


def _edge(kind: Kind, stage: int) -> tuple[int, int]:
    return stage, target_stage(kind, stage)
