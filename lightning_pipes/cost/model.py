"""The cost model: the duration of each instruction, and the bytes that it moves and holds."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from statistics import fmean
from typing import Protocol, runtime_checkable

from lightning_pipes.cost.layer import (
    Table,
    at_rows,
    check_table,
    check_tables,
    held_bytes,
    resident_bytes,
    to_nanoseconds,
)
from lightning_pipes.cost.links import FREE_LINK, Link, Regime, regime_named, unused_link_warnings
from lightning_pipes.cost.measurement import Measurement, RecordedTimeline, dispatch_delays, operation_seconds
from lightning_pipes.ir import (
    MAX_STAGES,
    RECOMPUTE_KINDS,
    SEND_KINDS,
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
    """The seconds and bytes of all stages and links.

    Attributes:
        seconds: for each (kind, stage), the seconds at some numbers of rows. Values are interpolated between them, and
            extrapolated along the two outermost entries. If there is only one entry, the time is the same for any
            number of rows. Times need not be proportional to rows. A STEP has 0 rows, and it takes no time if it is
            absent. Entries for SF and SB take precedence over bytes divided by the bandwidth.
        forward_bytes: the bytes per row from each stage s to stage s + 1. If empty, there are none.
        backward_bytes: the bytes per row from stage s + 1 to each stage s. If empty, there are none.
        links: exceptions from `link`, by (source rank, target rank).
        link: the link between all other ranks, in each direction.
        activation_bytes: the bytes per row that each stage holds from the start of F to the end of B (or W). If empty,
            there are none. A stage that recomputes holds its input instead, and the activations during the backward.
            Stage 0 reads its input from the batch.
        weight_bytes: the bytes of the weights of each stage, per job and weight version.
        state_bytes: the bytes of the gradients and the optimizer state of each stage, per job. They do not depend on
            the number of versions. If empty, there are none.
        working_bytes: the bytes per row that each stage needs while it computes, in addition to the bytes that it
            keeps. If empty, there are none.
        waiting_messages: for each stage and direction, the number of messages that wait at their receiver before they
            are needed.
        overhead: the seconds that a rank spends before each computation after the inputs have arrived.
        joining: the seconds per byte of samples that a computation concatenates from several parts, which happens if
            stages and links cut a batch in different ways. See `ir.count_concatenated`.
        regime: the name of the regime of messages in flight; see `cost.Regime`.
        each: the seconds of single operations, which replace `seconds` for micro-batches or batches that differ from
            others of the same size. The value for a backward includes its recomputation. The value for a send is the
            time that it occupies its link.
        scatter: for each (kind, stage), recorded times as multiples of `seconds`. Simulations are deterministic and
            ignore this attribute; `sim.draw_spread` samples from it.

    Raises:
        InputError: if a number is negative or infinite, if rows do not ascend, if sequences have the wrong length, or
            if the regime is unknown.
    """

    seconds: Mapping[tuple[Kind, int], Table] = field(hash=False)
    forward_bytes: tuple[float, ...] = ()
    backward_bytes: tuple[float, ...] = ()
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict, hash=False)
    link: Link = FREE_LINK
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
        except (TypeError, ValueError, AttributeError):  # checking all entries is slow, so do it only after an error
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
        link: Link = FREE_LINK,
        activation_bytes: int = 0,
        weight_bytes: int = 0,
        overhead: float = 0.0,
        regime: str = Regime.ASYNCHRONOUS,
    ) -> CostModel:
        """Create a model of equal stages. I and W take half of the backward each.

        Args:
            stages: the number of stages.
            forward: the seconds of a forward.
            backward: the seconds of a full backward.
            step: the seconds of an optimizer step.
            rows: the number of rows for which `forward` and `backward` hold. The times of other sizes are proportional
                to their rows. If None, the times hold for any number of rows.
            message_bytes: the bytes per row of a message in either direction.
            link: the link between all ranks.
            activation_bytes: the bytes of activations per row.
            weight_bytes: the bytes of weights per stage.
            overhead: the seconds before each computation.
            regime: the name of the regime of messages in flight.

        Raises:
            InputError: if there are no stages, or if another argument is invalid.
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
        """Return a model of median recorded times by (kind, stage, rows), including transfers and overhead.

        If a kind was recorded with only one number of rows, its time is assumed to be proportional to the rows, except
        for a STEP. If transfers were recorded, the links of the model have no bucket, because the recorded times
        include its effect.

        Args:
            timelines: one or several recorded runs.
            base: the model that provides everything else: bytes, links, and the times of kinds that did not run. The
                latency of its links is subtracted from the recorded transfers.

        Raises:
            InputError: if the timelines contain no events.
        """
        base = base or cls({})
        given = [timelines] if isinstance(timelines, RecordedTimeline) else [*timelines]
        found = Measurement.from_timelines(given, base._latency_ns)
        if not found.seconds:
            raise InputError("a cost model can't be measured from timelines without events")
        if any(kind in SEND_KINDS for kind, _ in found.seconds):
            links = {pair: replace(link, burst=0.0) for pair, link in base.links.items()}
            base = replace(base, link=replace(base.link, burst=0.0), links=links)
        overhead = base.overhead if found.overhead is None else found.overhead
        seconds, scatter = {**base.seconds, **found.seconds}, {**base.scatter, **found.scatter}
        return replace(base, seconds=seconds, scatter=scatter, overhead=overhead)

    def with_recorded_times(self, timeline: RecordedTimeline) -> CostModel:
        """Return this model with the recorded seconds of each operation of a timeline.

        Other operations keep their seconds. The overhead becomes the mean overhead of the timeline.

        Medians hide rare slow operations for which the pipeline waits. A simulation of the same order with the returned
        model therefore shows which part of the timeline the model explains.
        """
        waited = dispatch_delays(timeline)
        overhead = fmean(waited) / 1e9 if waited else self.overhead
        return replace(self, each={**self.each, **operation_seconds(timeline, self._latency_ns)}, overhead=overhead)

    def _latency_ns(self, i: Instruction, plan: Plan) -> int:
        return to_nanoseconds(self._link_of_send(i, plan).latency)

    @cached_property
    def n_stages(self) -> int:
        """The number of stages that have times."""
        return max((stage + 1 for _, stage in self.seconds), default=0)

    def seconds_at(self, kind: Kind, stage: int, rows: int = 0) -> float:
        """Return the seconds of a computation, or of a send with a given or measured time on its link.

        Without a time of its own, a recomputation (R) takes the time of the forward.

        Raises:
            InputError: if the model has no times of this kind on this stage.
        """
        table = self.seconds.get((kind, stage))
        if table is None and kind is Kind.R:
            table = self.seconds.get((Kind.F, stage))
        if table is None:
            if kind is Kind.STEP:
                return 0.0
            known = ", ".join(sorted({f"{k}{s}" for k, s in self.seconds})) or "nothing"
            raise InputError(f"the cost model has no time of {kind} on stage {stage}; it has {known}")
        return at_rows(table, rows)

    @property
    def overhead_ns(self) -> int:
        """The nanoseconds that a rank spends before each computation."""
        return to_nanoseconds(self.overhead)

    def duration_ns(self, i: Instruction, plan: Plan) -> int:
        """Return the nanoseconds of the computation `i`, summed over its passes.

        The duration of a backward includes its recomputation, unless the recomputation is an instruction of its own.
        """
        if self.each and i in self.each:
            return to_nanoseconds(self.each[i])
        found = 0
        for rows, again in layer_passes(i, plan):
            if i.kind is not Kind.R or again:
                found += self._pass_ns(i.kind, i.stage, rows)
            if again and i.kind in RECOMPUTE_KINDS and not plan.early_recompute:
                found += self._pass_ns(Kind.F, i.stage, rows)
        return found + self._concat_ns(i, plan) if self.joining else found

    def _concat_ns(self, i: Instruction, plan: Plan) -> int:
        forward = i.kind is Kind.F
        table = self.forward_bytes if forward else self.backward_bytes
        links = (i.stage - 1, i.stage) if forward else (i.stage, i.stage - 1)  # edges of the inputs and of the outputs
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
        """Return the nanoseconds that the send `i` occupies its link at the link's bandwidth, and its latency."""
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
        """Return the link from rank `source` to rank `target` in the regime of the model."""
        return Regime(self.regime).apply_to(self.links.get((source, target), self.link), source, target)

    @property
    def per_instruction(self) -> bool:
        """Whether operations of the same size may have different costs."""
        return bool(self.each)

    def check(self, plan: Plan) -> None:
        """Check that the model covers all stages of a plan, and warn about settings that no message of the plan uses.

        The simulator calls this method.

        Raises:
            InputError: if the plan has more stages than the model.
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
        """Return the bytes that `i` allocates when it starts and frees when it ends; see `cost.layer.held_bytes`."""
        return held_bytes(self, i, plan)

    def resident_bytes(self, rank: int, plan: Plan) -> int:
        """Return the bytes that `rank` holds all the time; see `cost.layer.resident_bytes`."""
        return resident_bytes(self, rank, plan)


class Costs(Protocol):
    """The costs that a simulation reads, in integer nanoseconds and bytes.

    `CostModel` is sufficient for most uses. Implement this protocol if costs depend on more than the kind, stage and
    rows, for example on the batch. The simulator caches the results of an object, so create a new object for other
    costs.
    """

    @property
    def overhead_ns(self) -> int:
        """The nanoseconds that a rank spends before each computation."""

    def duration_ns(self, i: Instruction, plan: Plan) -> int:
        """Return the nanoseconds of the computation `i`, summed over its `ir.layer_passes`.

        Computations with the same kind, stage, job, batch and `ir.cost_key` must have the same cost.
        """

    def transfer_ns(self, i: Instruction, plan: Plan) -> tuple[int, int]:
        """Return the nanoseconds that the send `i` occupies its link at the link's bandwidth, and its latency.

        The latency is the time from then to the arrival of the message.
        """

    def link_between(self, source: int, target: int) -> Link:
        """Return the link from rank `source` to rank `target`, for all properties that `transfer_ns` does not cover."""

    def memory_change(self, i: Instruction, plan: Plan) -> tuple[int, int]:
        """Return the bytes that the computation `i` allocates when it starts and frees when it ends."""

    def resident_bytes(self, rank: int, plan: Plan) -> int:
        """Return the bytes that `rank` holds all the time."""


@runtime_checkable
class PerInstructionCosts(Protocol):
    """Costs that may differ between operations of the same size.

    The simulator then requests the cost of each operation separately.
    """

    @property
    def per_instruction(self) -> bool:
        """Whether operations of the same size may have different costs."""
