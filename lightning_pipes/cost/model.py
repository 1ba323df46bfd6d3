"""Seconds of each instruction, and the bytes that it moves and holds."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise
from statistics import fmean
from typing import Protocol, runtime_checkable

from lightning_pipes.cost.cluster import Cluster
from lightning_pipes.cost.layer import (
    Table,
    at_rows,
    check_table,
    check_tables,
    held_bytes,
    resident_bytes,
    to_nanoseconds,
)
from lightning_pipes.cost.links import FREE, Link, Regime, regime_named, unused_link_warnings
from lightning_pipes.cost.measurement import Measurement, RecordedTimeline, dispatch_delays, operation_seconds
from lightning_pipes.ir import (
    COMPUTE,
    MAX_STAGES,
    RECOMPUTES,
    SENDS,
    InputError,
    Instruction,
    Kind,
    Plan,
    check_count,
    check_fields,
    check_number,
    check_type,
    count_concatenated,
    layer_passes,
    short_repr,
)


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
        joining: seconds per byte of samples that a computation joins from several parts, see `ir.count_concatenated`:
            where stages and links cut a batch in different ways.
        regime: the name of the regime of messages in flight; see `cost.Regime`.
        each: seconds of single operations in place of `seconds`, for micro-batches or batches that differ from others
            of their size. For a backward with its recomputation, for a send the time that it occupies its link.
        scatter: by (kind, stage), recorded times as multiples of `seconds`. Simulations are deterministic and ignore
            it; `sim.draw_spread` samples from it.

    Raises:
        InputError: a negative or infinite number, rows that do not ascend, tables of different lengths, or an unknown
            regime.
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
    joining: float = 0.0
    regime: str = Regime.ASYNCHRONOUS
    each: Mapping[Instruction, float] = field(default_factory=dict, hash=False)
    scatter: Mapping[tuple[Kind, int], tuple[float, ...]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        try:
            self._check()
        except (TypeError, ValueError, AttributeError):  # searches make thousands: entries are looked at only now
            check_tables(self.seconds)
            check_fields(self)
            raise

    def _check(self) -> None:
        check_fields(self, entries=False)
        object.__setattr__(self, "regime", regime_named(self.regime))
        n = self.n_stages
        for (kind, stage), table in self.seconds.items():
            check_table(f"{kind}{stage}", table)
        lengths = {"forward_bytes": n - 1, "backward_bytes": n - 1, "activation_bytes": n, "weight_bytes": n}
        lengths |= {"state_bytes": n, "working_bytes": n}
        for name, entries in lengths.items():
            got = getattr(self, name)
            if got and (len(got) != entries or not all(0 <= size < math.inf for size in got)):
                raise InputError(f"{name} needs {entries} finite numbers >= 0 for {n} stages, got {short_repr(got)}")
        if not all(isinstance(link, Link) for link in self.links.values()):
            raise TypeError
        for name in ("overhead", "joining"):
            check_number(name, getattr(self, name), "finite seconds, not negative", lambda x: 0 <= x < math.inf)
        if not all(isinstance(i, Instruction) for i in self.each) or not all(
            isinstance(k, tuple) for k in self.scatter
        ):
            raise TypeError
        for what, times in (("each", self.each.values()), ("scatter", chain.from_iterable(self.scatter.values()))):
            if not all(0 <= t < math.inf for t in times):
                raise InputError(f"{what} needs finite numbers, none negative, got {short_repr(getattr(self, what))}")
        if self.waiting_messages < 0:
            raise InputError(f"waiting_messages count from 0, got {short_repr(self.waiting_messages)}")

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
        regime: str = Regime.ASYNCHRONOUS,
    ) -> CostModel:
        """Create a model of equal stages: seconds of a forward, a backward (I and W take half each) and a step.

        The times hold for any micro-batch; with `rows` they hold for that many rows, and others take proportionally
        long. `message_bytes` and `activation_bytes` are per row.

        Raises:
            InputError: no stages, or what `CostModel` refuses.
        """
        check_count("stages", stages, most=MAX_STAGES)
        if rows is not None:
            check_count("rows", rows)
        check_type("activation_bytes", activation_bytes, int)
        check_type("weight_bytes", weight_bytes, int)
        check_number("message_bytes", message_bytes, "bytes from 0 on", lambda x: 0 <= x < math.inf)
        for name, time in (("forward", forward), ("backward", backward), ("step", step)):
            check_number(name, time, "finite seconds, not negative", lambda x: 0 <= x < math.inf)

        def make_table(seconds: float) -> Table:
            return ((1, seconds),) if rows is None else ((0, 0.0), (rows, seconds))

        times = {Kind.F: forward, Kind.B: backward, Kind.I: backward / 2, Kind.W: backward / 2}
        seconds = {(kind, s): make_table(t) for kind, t in times.items() for s in range(stages)}
        seconds |= {(Kind.STEP, s): ((0, step),) for s in range(stages)}
        edges = (message_bytes,) * (stages - 1)
        return cls(
            seconds,
            forward_bytes=edges,
            backward_bytes=edges,
            link=link,
            regime=regime,
            activation_bytes=(activation_bytes,) * stages,
            weight_bytes=(weight_bytes,) * stages,
            overhead=overhead,
        )

    @classmethod
    def from_timelines(
        cls, timelines: RecordedTimeline | Iterable[RecordedTimeline], base: CostModel | None = None
    ) -> CostModel:
        """Return medians of recorded times by (kind, stage, rows), with transfers and the overhead of computations.

        A kind recorded with one number of rows only is taken as proportional to rows, except STEP. The rest comes from
        `base`: bytes, links (their latency is subtracted from the transfers), and kinds that did not run. Where
        transfers were recorded, links have no bucket, because the recorded times include its effect.

        Raises:
            InputError: nothing was recorded.
        """
        base = base or cls({})
        given = [timelines] if isinstance(timelines, RecordedTimeline) else [*timelines]
        found = Measurement.from_timelines(given, base._latency_ns)
        if not found.seconds:
            raise InputError("a cost model can't be measured from timelines without events")
        if any(kind in SENDS for kind, _ in found.seconds):
            links = {pair: replace(link, burst=0.0) for pair, link in base.links.items()}
            base = replace(base, link=replace(base.link, burst=0.0), links=links)
        overhead = base.overhead if found.overhead is None else found.overhead
        seconds, scatter = {**base.seconds, **found.seconds}, {**base.scatter, **found.scatter}
        return replace(base, seconds=seconds, scatter=scatter, overhead=overhead)

    def with_recorded_times(self, timeline: RecordedTimeline) -> CostModel:
        """Return this model with the recorded seconds of each operation of `timeline`. Other operations keep their
        seconds; the overhead of computations becomes the mean of the timeline.

        Medians hide rare slow operations, for which the pipeline waits. A simulation of the same order with this model
        therefore shows the part of the timeline that the model explains.
        """
        waited = dispatch_delays(timeline)
        overhead = fmean(waited) / 1e9 if waited else self.overhead
        return replace(self, each={**self.each, **operation_seconds(timeline, self._latency_ns)}, overhead=overhead)

    def _latency_ns(self, i: Instruction, plan: Plan) -> int:
        return to_nanoseconds(self._link_of_send(i, plan).latency)

    def on_cluster(self, cluster: Cluster, ranks: tuple[int, ...]) -> CostModel:
        """Return this model on `cluster`, for stages placed on `ranks`: with the links of the cluster, and times
        divided by the speeds of its devices."""
        pairs = {(a, b) for a, b in (*pairwise(ranks), *pairwise(ranks[::-1])) if a != b}
        scaled = {
            (kind, stage): tuple((rows, seconds / cluster.devices[ranks[stage]].speed) for rows, seconds in table)
            for (kind, stage), table in self.seconds.items()
            if kind in COMPUTE
        }
        each = {
            i: seconds / cluster.devices[ranks[i.stage]].speed for i, seconds in self.each.items() if i.kind in COMPUTE
        }
        return replace(self, seconds=scaled, each=each, links={pair: cluster.link_between(*pair) for pair in pairs})

    @cached_property
    def n_stages(self) -> int:
        """Number of stages that have times."""
        return max((stage + 1 for _, stage in self.seconds), default=0)

    def seconds_at(self, kind: Kind, stage: int, rows: int = 0) -> float:
        """Return the seconds of one computation, or of one send on its link where that is given or measured.

        Raises:
            InputError: the model has no times of this kind on this stage.
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
        """Nanoseconds that a rank spends before each computation."""
        return to_nanoseconds(self.overhead)

    def duration_ns(self, i: Instruction, plan: Plan) -> int:
        """Return the nanoseconds of the computation `i`, summed over its passes; a backward includes its
        recomputation."""
        if self.each and i in self.each:
            return to_nanoseconds(self.each[i])
        found = 0
        for rows, again in layer_passes(i, plan):
            found += self._pass_ns(i.kind, i.stage, rows)
            if again and i.kind in RECOMPUTES:
                found += self._pass_ns(Kind.F, i.stage, rows)
        return found + self._concat_ns(i, plan) if self.joining else found

    def _concat_ns(self, i: Instruction, plan: Plan) -> int:
        forward = i.kind is Kind.F
        table = self.forward_bytes if forward else self.backward_bytes
        links = (
            (i.stage - 1, i.stage) if forward else (i.stage, i.stage - 1)
        )  # from which it takes, and to which it goes
        size = sum(
            rows * table[link] for rows, link in zip(count_concatenated(i, plan), links, strict=True) if rows and table
        )
        return to_nanoseconds(self.joining * size)

    def _pass_ns(self, kind: Kind, stage: int, rows: int) -> int:
        known = self._durations.get((kind, stage, rows))
        if known is None:
            known = self._durations[kind, stage, rows] = to_nanoseconds(self.seconds_at(kind, stage, rows))
        return known

    @cached_property
    def _durations(self) -> dict[tuple[Kind, int, int], int]:
        return {}

    def transfer_ns(self, i: Instruction, plan: Plan) -> tuple[int, int]:
        """Return the nanoseconds that the send `i` occupies its link at the link's bandwidth, and the latency after
        that."""
        link = self._link_of_send(i, plan)
        if self.each and i in self.each:
            return to_nanoseconds(self.each[i]), to_nanoseconds(link.latency)
        if (i.kind, i.stage) in self.seconds:
            return to_nanoseconds(self.seconds_at(i.kind, i.stage, i.span.rows)), to_nanoseconds(link.latency)
        table, edge = (self.forward_bytes, i.stage) if i.kind is Kind.SF else (self.backward_bytes, i.stage - 1)
        return to_nanoseconds(link.send_seconds(table[edge] * i.span.rows if table else 0.0)), to_nanoseconds(
            link.latency
        )

    def _link_of_send(self, i: Instruction, plan: Plan) -> Link:
        return self.links.get((plan.rank_of(i), plan.target_rank(i)), self.link)

    def link_between(self, source: int, target: int) -> Link:
        """Return the link from rank `source` to rank `target`, in the model's regime."""
        return Regime(self.regime).apply_to(self.links.get((source, target), self.link), source, target)

    @property
    def per_instruction(self) -> bool:
        """Whether operations of one size may differ in cost."""
        return bool(self.each)

    def check(self, plan: Plan) -> None:
        """Refuse a plan with more stages than the model, and warn of settings that no message of the plan uses. The
        simulator calls this.

        Raises:
            InputError: the plan has more stages.
        """
        n = self.n_stages
        if n < plan.n_stages:
            lacking = ", ".join(map(str, range(n, plan.n_stages)[:4])) + (", ..." if plan.n_stages - n > 4 else "")
            raise InputError(
                f"the cost model has times of {n} stages and the plan has {plan.n_stages}: there are no times of stage "
                f"{lacking}. Give seconds of each kind that it runs, as in seconds[Kind.F, {n}] = ((1, 0.01),), or "
                f"make the model with stages={plan.n_stages}"
            )
        if self.links or self.link.bandwidth < math.inf:
            sized = {kind for kind, _ in self.seconds} | {i.kind for i in self.each}
            sized |= {Kind.SF} if any(self.forward_bytes) else set()
            sized |= {Kind.SB} if any(self.backward_bytes) else set()
            for sentence in unused_link_warnings(plan, self.links, self.link, sized):
                warnings.warn(sentence, stacklevel=2)

    def memory_change(self, i: Instruction, plan: Plan) -> tuple[int, int]:
        """Return the bytes that `i` allocates at its start, and the bytes that it frees at its end; see
        `cost.layer.held_bytes`."""
        return held_bytes(self, i, plan)

    def resident_bytes(self, rank: int, plan: Plan) -> int:
        """Return the bytes that `rank` holds throughout; see `cost.layer.resident_bytes`."""
        return resident_bytes(self, rank, plan)


class Costs(Protocol):
    """Costs that a simulation reads, in integer nanoseconds and bytes. `CostModel` is enough for most. Implement your
    own where costs depend on more than kind, stage and rows, such as on the batch. The simulator caches the answers of
    an object, so create another object for other costs."""

    @property
    def overhead_ns(self) -> int:
        """Nanoseconds that a rank spends before each computation."""

    def duration_ns(self, i: Instruction, plan: Plan) -> int:
        """Return the nanoseconds of the computation `i`, all of its `ir.layer_passes`. Equal kind, stage, job, batch
        and `ir.cost_key` mean equal cost."""

    def transfer_ns(self, i: Instruction, plan: Plan) -> tuple[int, int]:
        """Return the nanoseconds that the send `i` occupies its link at the link's bandwidth, and the nanoseconds from
        then to its arrival."""

    def link_between(self, source: int, target: int) -> Link:
        """Return the link from rank `source` to rank `target`, for all that `transfer_ns` does not cover."""

    def memory_change(self, i: Instruction, plan: Plan) -> tuple[int, int]:
        """Return the bytes that the computation `i` allocates at its start, and the bytes that it frees at its end."""

    def resident_bytes(self, rank: int, plan: Plan) -> int:
        """Return the bytes that `rank` holds throughout."""


@runtime_checkable
class PerInstructionCosts(Protocol):
    """Costs that may differ between operations of one size; the simulator then asks for each operation."""

    @property
    def per_instruction(self) -> bool:
        """Whether operations of one size may differ in cost."""
