"""How long each instruction takes, and how many bytes it moves and holds."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Protocol, runtime_checkable

from lightning_pipes.cost.cluster import FREE, LONGEST, Cluster, Link
from lightning_pipes.ir import (
    COMPUTE,
    MOST_STAGES,
    RECEIVES,
    SENDS,
    InputError,
    Instruction,
    Kind,
    Pass,
    Plan,
    check_count,
    check_fields,
    check_number,
    check_type,
    needs,
    passes,
    send_of,
    shown,
)

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
        """Nanoseconds of the computation `i`, all of its `ir.passes`; equal kind, stage, job, batch and `ir.alike` mean
        equal cost."""

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
        InputError: a negative or infinite number, rows that do not ascend, or tables of different lengths.
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
        try:
            self._check()
        except (TypeError, ValueError, AttributeError):  # searches make thousands: entries are looked at only now
            check_fields(self)
            raise

    def _check(self) -> None:
        check_fields(self, entries=False)
        n = self.n_stages
        for (kind, stage), table in self.seconds.items():
            rows = [r for r, _ in table]
            if not table or rows != sorted(set(rows)) or not all(0 <= t < math.inf for _, t in table):
                raise InputError(
                    f"seconds of {kind}{stage} need ascending rows and times that are finite and not negative, got "
                    f"{shown(table)}"
                )
        lengths = {"forward_bytes": n - 1, "backward_bytes": n - 1, "activation_bytes": n, "weight_bytes": n}
        lengths |= {"state_bytes": n, "working_bytes": n}
        for name, entries in lengths.items():
            got = getattr(self, name)
            if got and (len(got) != entries or not all(0 <= size < math.inf for size in got)):
                raise InputError(f"{name} needs {entries} finite numbers >= 0 for {n} stages, got {shown(got)}")
        if not all(isinstance(link, Link) for link in self.links.values()):
            raise TypeError
        check_number("overhead", self.overhead, "finite seconds, not negative", lambda x: 0 <= x < math.inf)
        if self.waiting_messages < 0:
            raise InputError(f"waiting_messages count from 0, got {shown(self.waiting_messages)}")

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

        Raises:
            InputError: no stages, or what `CostModel` refuses.
        """
        check_count("stages", stages, most=MOST_STAGES)
        if rows is not None:
            check_count("rows", rows)
        check_type("activation_bytes", activation_bytes, int)
        check_type("weight_bytes", weight_bytes, int)
        check_number("message_bytes", message_bytes, "bytes from 0 on", lambda x: 0 <= x < math.inf)
        for name, time in (("forward", forward), ("backward", backward), ("step", step)):
            check_number(name, time, "finite seconds, not negative", lambda x: 0 <= x < math.inf)

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
            InputError: nothing was recorded.
        """
        base = base or cls({})
        computed: list[tuple[Instruction, int, Plan]] = []
        sent: dict[tuple[Kind, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        waited: list[int] = []
        for timeline in [timelines] if isinstance(timelines, Recorded) else timelines:
            waited += lags(timeline)
            for _, i, start, end in timeline.events:
                if i.kind in COMPUTE:
                    computed.append((i, end - start, timeline.plan))
                elif i.kind in SENDS:
                    latency = _ns(base._link_of(i, timeline.plan).latency)
                    sent[i.kind, i.stage][i.span.rows].append(max(0, end - start - latency))
        seen = {**times_of_passes(computed), **sent}
        if not seen:
            raise InputError("a cost model can't be measured from timelines without events")
        tables = {key: {rows: median(times) / 1e9 for rows, times in by.items()} for key, by in seen.items()}
        for (kind, _), points in tables.items():
            if len(points) == 1 and kind is not Kind.STEP:
                points[0] = 0.0
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
            InputError: the model does not know this kind on this stage.
        """
        table = self.seconds.get((kind, stage))
        if table is None:
            if kind is Kind.STEP:
                return 0.0
            known = ", ".join(sorted({f"{k}{s}" for k, s in self.seconds})) or "nothing"
            raise InputError(f"the cost model has no time of {kind} on stage {stage}; it knows {known}")
        return at_rows(table, rows)

    @property
    def overhead_ns(self) -> int:
        """Nanoseconds that a rank needs before each computation."""
        return _ns(self.overhead)

    def duration(self, i: Instruction, plan: Plan) -> int:
        """Nanoseconds of the computation `i`, pass by pass; a backward includes the forward that it runs again."""
        found = 0
        for rows, again in passes(i, plan):
            found += self._pass(i.kind, i.stage, rows)
            if again and i.kind in _BACKWARD:
                found += self._pass(Kind.F, i.stage, rows)
        return found

    def _pass(self, kind: Kind, stage: int, rows: int) -> int:
        known = self._durations.get((kind, stage, rows))
        if known is None:
            known = self._durations[kind, stage, rows] = _ns(self.time(kind, stage, rows))
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
        """Bytes of activations that `i` takes when it starts, and bytes that it gives back when it ends. A forward in
        several passes takes what it comes to hold at most; a backward starts with all that it has to make again."""
        if i.kind is Kind.STEP or not (self.activation_bytes or self.working_bytes):
            return 0, 0
        s = i.stage
        all_of_it = self.activation_bytes[s] if self.activation_bytes else 0
        received = int(self.forward_bytes[s - 1]) if s > 0 and self.forward_bytes else 0
        kept = made_again = most = working = 0
        for rows, again in passes(i, plan):
            at_work = int(self.working_bytes[s] * rows) if self.working_bytes else 0
            working = max(working, at_work)
            kept += (received if again else all_of_it) * rows
            made_again += all_of_it * rows if again else 0
            most = max(most, kept + at_work)
        match i.kind:
            case Kind.F:
                return most, most - kept
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


def times_of_passes(
    computed: Iterable[tuple[Instruction, float, Plan]],
) -> dict[tuple[Kind, int], dict[int, list[float]]]:
    """Nanoseconds of single passes, by kind and stage, and by rows, from those of whole computations.

    Passes share the time of their computation by their samples, as no more is to be seen from outside. Forwards that a
    backward ran again are taken off: the median of those that were seen.
    """
    found: dict[tuple[Kind, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    later: list[tuple[Instruction, float, tuple[Pass, ...]]] = []

    def share(i: Instruction, took: float, each: Sequence[Pass]) -> None:
        for rows, _ in each:
            found[i.kind, i.stage][rows].append(took if len(each) == 1 else took * rows / i.span.rows)

    for i, took, plan in computed:
        each = passes(i, plan)
        if i.kind in _BACKWARD and any(again for _, again in each):
            later.append((i, took, each))
        else:
            share(i, took, each)
    forward: dict[int, Table] = {}
    for i, took, each in later:
        if i.stage not in forward:
            points = {rows: median(times) for rows, times in found[Kind.F, i.stage].items()}
            forward[i.stage] = tuple(sorted(({0: 0.0} | points if len(points) == 1 else points).items()))
        again = sum(at_rows(forward[i.stage], rows) for rows, runs_again in each if runs_again)
        share(i, max(0.0, took - again), each)
    return {key: by for key, by in found.items() if by}


def _ns(seconds: float) -> int:
    if not seconds < LONGEST:
        raise InputError(f"{seconds:g} s are more than can be simulated; look for a unit that is wrong, or a slow link")
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
