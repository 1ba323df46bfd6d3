"""How long each instruction takes, and how many bytes it moves and holds."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Protocol, runtime_checkable

from lightning_pipes.cost.cluster import FREE, Cluster, Link
from lightning_pipes.ir import COMPUTE, RECEIVES, SENDS, Instruction, Kind, Plan, PlanError, needs, send_of

Table = tuple[tuple[int, float], ...]
"""(rows, seconds), rows ascending."""

_BACKWARD = {Kind.B, Kind.I}  # either runs the forward again where a stage recomputes


class Costs(Protocol):
    """The costs that a simulation asks for, in integer nanoseconds and bytes. `CostModel` answers it for most; give
    your own where cost depends on more than kind, stage and rows, such as on the batch. What an object says is
    remembered: for other costs make another."""

    @property
    def overhead_ns(self) -> int:
        """Nanoseconds that a rank needs before each computation."""

    def duration(self, i: Instruction, plan: Plan) -> int:
        """Nanoseconds of the computation `i`; equal kind, stage, job, batch and rows mean equal cost."""

    def transfer(self, i: Instruction, plan: Plan) -> tuple[int, int]:
        """Nanoseconds that the send `i` occupies its link at the link's bandwidth, and nanoseconds until it is there
        after that."""

    def between(self, source: int, target: int) -> Link:
        """The link from rank `source` to rank `target`: what `transfer` does not say of it."""

    def held(self, i: Instruction, plan: Plan) -> tuple[int, int]:
        """Bytes that the computation `i` takes when it starts, and bytes that it gives back when it ends."""

    def resident(self, rank: int, plan: Plan) -> int:
        """Bytes that `rank` holds throughout."""


@runtime_checkable
class Recorded(Protocol):
    """The measurements that a model is made from; a `Timeline` is one."""

    @property
    def plan(self) -> Plan:
        """The plan that ran."""

    @property
    def events(self) -> Sequence[tuple[int, Instruction, int, int]]:
        """(rank, instruction, start, end) in nanoseconds; sends from the start of the transfer to its arrival."""


@dataclass(frozen=True)
class CostModel:
    """Seconds and bytes of every stage and link.

    Attributes:
        seconds: by (kind, stage), seconds at some numbers of rows: linear between them, along the outermost two
            beyond them, the same for any rows where there is one entry only. Times are not proportional to rows. A STEP
            has 0 rows and takes no time where it is absent; an SF or SB here overrides bytes over bandwidth.
        forward_bytes: bytes per row from stage s to s + 1; empty means none.
        backward_bytes: bytes per row from stage s + 1 back to s; empty means none.
        links: exceptions from `link`, by (from rank, to rank).
        link: between all other ranks, each direction.
        activation_bytes: bytes per row that stage s holds from the start of F to the end of B (or W); empty means none.
            A stage that recomputes holds its input instead, and the activations during backward; stage 0 reads its
            input from the batch.
        weight_bytes: bytes of stage s per job and weight version.
        state_bytes: bytes of stage s per job, however many versions: gradients and optimizer; empty means none.
        working_bytes: bytes per row that stage s needs while it computes, on top of what it keeps; empty means none.
        waiting_messages: messages that lie with their receiver before they are needed, of each stage and direction.
        overhead: seconds that a rank spends before each computation once its inputs are there.

    Raises:
        PlanError: a negative number, rows that do not ascend, or tables of different lengths.
    """

    seconds: Mapping[tuple[Kind, int], Table] = field(hash=False)
    forward_bytes: tuple[float, ...] = ()
    backward_bytes: tuple[float, ...] = ()
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict, hash=False)
    link: Link = FREE
    activation_bytes: tuple[int, ...] = ()
    weight_bytes: tuple[int, ...] = ()
    state_bytes: tuple[int, ...] = ()
    working_bytes: tuple[float, ...] = ()
    waiting_messages: int = 0
    overhead: float = 0.0

    def __post_init__(self) -> None:
        n = self.n_stages
        for (kind, stage), table in self.seconds.items():
            rows = [r for r, _ in table]
            if not table or rows != sorted(set(rows)) or min(t for _, t in table) < 0:
                raise PlanError(f"seconds of {kind}{stage} need ascending rows and no negative time, got {table}")
        lengths = {"forward_bytes": n - 1, "backward_bytes": n - 1, "activation_bytes": n, "weight_bytes": n}
        lengths |= {"state_bytes": n, "working_bytes": n}
        for name, entries in lengths.items():
            got = getattr(self, name)
            if got and (len(got) != entries or min(got) < 0):
                raise PlanError(f"{name} needs {entries} numbers >= 0 for {n} stages, got {got}")
        if self.overhead < 0:
            raise PlanError(f"overhead can't be negative, got {self.overhead}")

    @classmethod
    def uniform(
        cls,
        stages: int,
        forward: float,
        backward: float,
        *,
        step: float = 0.0,
        rows: int | None = None,
        message_bytes: float = 0.0,
        link: Link = FREE,
        activation_bytes: int = 0,
        weight_bytes: int = 0,
        overhead: float = 0.0,
    ) -> CostModel:
        """Equal stages: seconds of a forward, a backward (I and W take half of it each) and a step.

        The times hold for any micro-batch; with `rows` they hold for that many rows, and others take proportionally
        long. `message_bytes` and `activation_bytes` are per row.
        """

        def table(seconds: float) -> Table:
            return ((1, seconds),) if rows is None else ((0, 0.0), (rows, seconds))

        times = {Kind.F: forward, Kind.B: backward, Kind.I: backward / 2, Kind.W: backward / 2}
        seconds = {(kind, s): table(t) for kind, t in times.items() for s in range(stages)}
        seconds |= {(Kind.STEP, s): ((0, step),) for s in range(stages)}
        edges = (message_bytes,) * (stages - 1)
        return cls(
            seconds,
            forward_bytes=edges,
            backward_bytes=edges,
            link=link,
            activation_bytes=(activation_bytes,) * stages,
            weight_bytes=(weight_bytes,) * stages,
            overhead=overhead,
        )

    @classmethod
    def measured(cls, timelines: Recorded | Iterable[Recorded], base: CostModel | None = None) -> CostModel:
        """Medians by (kind, stage, rows) of what was recorded, transfers and the overhead of computations included.

        A kind seen with one number of rows only is taken as proportional to rows, STEP excepted. What timelines do not
        show is kept from `base`: bytes, links (whose latency is taken off the transfers), kinds that did not run. Where
        transfers were recorded, links have no bucket: what they took shows what it did.

        Raises:
            PlanError: nothing was recorded.
        """
        base = base or cls({})
        seen: dict[tuple[Kind, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        recomputed: set[int] = set()
        waited: list[int] = []
        for timeline in [timelines] if isinstance(timelines, Recorded) else timelines:
            recomputed |= {s for s, again in enumerate(timeline.plan.recompute) if again}
            waited += lags(timeline)
            for _, i, start, end in timeline.events:
                if i.kind in COMPUTE:
                    seen[i.kind, i.stage][i.span.rows].append(end - start)
                elif i.kind in SENDS:
                    latency = _ns(base._link_of(i, timeline.plan).latency)
                    seen[i.kind, i.stage][i.span.rows].append(max(0, end - start - latency))
        if not seen:
            raise PlanError("a cost model can't be measured from timelines without events")
        tables = {key: {rows: median(times) / 1e9 for rows, times in by.items()} for key, by in seen.items()}
        for (kind, stage), points in tables.items():
            if len(points) == 1 and kind is not Kind.STEP:
                points[0] = 0.0
            if kind in _BACKWARD and stage in recomputed:
                forward = tables[Kind.F, stage]
                for rows in points:
                    points[rows] = max(0.0, points[rows] - at_rows(tuple(sorted(forward.items())), rows))
        measured = {key: tuple(sorted(points.items())) for key, points in tables.items()}
        if any(kind in SENDS for kind, _ in measured):
            links = {pair: replace(link, burst=0.0) for pair, link in base.links.items()}
            base = replace(base, link=replace(base.link, burst=0.0), links=links)
        overhead = median(waited) / 1e9 if waited else base.overhead
        return replace(base, seconds={**base.seconds, **measured}, overhead=overhead)

    def on(self, cluster: Cluster, ranks: tuple[int, ...]) -> CostModel:
        """The same model on `cluster`, for stages that sit on `ranks`: its links, and times by its devices' speed."""
        pairs = {(a, b) for a in set(ranks) for b in set(ranks) if a != b}
        scaled = {
            (kind, stage): tuple((rows, seconds / cluster.devices[ranks[stage]].speed) for rows, seconds in table)
            for (kind, stage), table in self.seconds.items()
            if kind in COMPUTE
        }
        return replace(self, seconds=scaled, links={pair: cluster.link(*pair) for pair in pairs})

    @cached_property
    def n_stages(self) -> int:
        """The number of stages that have times."""
        return max((stage + 1 for _, stage in self.seconds), default=0)

    def time(self, kind: Kind, stage: int, rows: int = 0) -> float:
        """Seconds of one computation, or that one send occupies its link where that was given or measured.

        Raises:
            PlanError: the model does not know this kind on this stage.
        """
        table = self.seconds.get((kind, stage))
        if table is None:
            if kind is Kind.STEP:
                return 0.0
            known = ", ".join(sorted({f"{k}{s}" for k, s in self.seconds})) or "nothing"
            raise PlanError(f"the cost model has no time of {kind} on stage {stage}; it knows {known}")
        return at_rows(table, rows)

    @property
    def overhead_ns(self) -> int:
        """Nanoseconds that a rank needs before each computation."""
        return _ns(self.overhead)

    def duration(self, i: Instruction, plan: Plan) -> int:
        """Nanoseconds of the computation `i`; where its stage recomputes, backward includes a forward."""
        known = self._durations.get((i.kind, i.stage, i.span.rows))
        if known is None:
            known = self._durations[i.kind, i.stage, i.span.rows] = _ns(self.time(i.kind, i.stage, i.span.rows))
        if i.kind in _BACKWARD and plan.recompute and plan.recompute[i.stage]:
            return known + _ns(self.time(Kind.F, i.stage, i.span.rows))
        return known

    @cached_property
    def _durations(self) -> dict[tuple[Kind, int, int], int]:
        return {}

    def transfer(self, i: Instruction, plan: Plan) -> tuple[int, int]:
        """Nanoseconds that the send `i` occupies its link at the link's bandwidth, and of latency after that."""
        link = self._link_of(i, plan)
        if (i.kind, i.stage) in self.seconds:
            return _ns(self.time(i.kind, i.stage, i.span.rows)), _ns(link.latency)
        table, edge = (self.forward_bytes, i.stage) if i.kind is Kind.SF else (self.backward_bytes, i.stage - 1)
        return _ns(link.seconds(table[edge] * i.span.rows if table else 0.0)), _ns(link.latency)

    def _link_of(self, i: Instruction, plan: Plan) -> Link:
        target = i.stage + 1 if i.kind is Kind.SF else i.stage - 1
        return self.between(plan.ranks[i.stage], plan.ranks[target])

    def between(self, source: int, target: int) -> Link:
        """The link from rank `source` to rank `target`."""
        return self.links.get((source, target), self.link)

    def held(self, i: Instruction, plan: Plan) -> tuple[int, int]:
        """Bytes of activations that `i` takes when it starts, and bytes that it gives back when it ends."""
        if i.kind is Kind.STEP or not (self.activation_bytes or self.working_bytes):
            return 0, 0
        s, rows = i.stage, i.span.rows
        all_of_it = self.activation_bytes[s] * rows if self.activation_bytes else 0
        working = int(self.working_bytes[s] * rows) if self.working_bytes else 0
        again = bool(plan.recompute) and plan.recompute[s]
        kept = all_of_it
        if again:
            kept = int(self.forward_bytes[s - 1]) * rows if s > 0 and self.forward_bytes else 0
        made_again = all_of_it if again else 0
        match i.kind:
            case Kind.F:
                return kept + working, working
            case Kind.I:
                return made_again + working, working
            case Kind.B:
                return made_again + working, kept + made_again + working
            case _:
                return working, kept + made_again + working

    def resident(self, rank: int, plan: Plan) -> int:
        """Bytes that `rank` holds throughout: weights, of every weight version that the plan allows, gradients,
        optimizer states and messages that wait to be taken."""
        stages = plan.stages[rank]
        weights = sum(self.weight_bytes[s] * plan.versions[s] for s in stages) if self.weight_bytes else 0
        states = sum(self.state_bytes[s] for s in stages) if self.state_bytes else 0
        return len(plan.jobs) * (weights + states + self._waiting(stages, plan))

    def _waiting(self, stages: Sequence[int], plan: Plan) -> int:
        if not self.waiting_messages:
            return 0
        size = 0.0
        for s in stages:
            if s and plan.crosses(s - 1) and self.forward_bytes:
                size += self.forward_bytes[s - 1] * max(span.rows for span in plan.spans(Kind.RF, s))
            if s + 1 < plan.n_stages and plan.crosses(s) and self.backward_bytes:
                size += self.backward_bytes[s] * max(span.rows for span in plan.spans(Kind.RB, s))
        return int(self.waiting_messages * size)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def lags(timeline: Recorded, of: Set[Kind] = COMPUTE) -> list[int]:
    """Nanoseconds from the moment when a computation had its inputs and its rank was free until it started, for those
    kinds of computations."""
    arrivals = {i: end for _, i, _, end in timeline.events if i.kind in SENDS}
    free: dict[int, int] = {}
    found = []
    for rank, i, start, end in sorted(timeline.events, key=lambda e: e[2]):
        if i.kind in COMPUTE:
            inputs = [arrivals.get(send_of(n), 0) for n in needs(i, timeline.plan) if n.kind in RECEIVES]
            if i.kind in of and (rank in free or inputs):
                found.append(max(0, start - max(free.get(rank, 0), *inputs, 0)))
            free[rank] = end
    return found


def at_rows(table: Table, rows: int) -> float:
    """`table` at `rows`: linear, beyond its ends too, never negative; 0 where it is empty."""
    if not table:
        return 0.0
    if len(table) == 1:
        return table[0][1]
    right = min(max(bisect_left(table, (rows, -1.0)), 1), len(table) - 1)
    (x0, y0), (x1, y1) = table[right - 1], table[right]
    if rows == x1:
        return y1  # exact: no rounding by the line through it
    return max(0.0, y0 + (y1 - y0) * (rows - x0) / (x1 - x0))
