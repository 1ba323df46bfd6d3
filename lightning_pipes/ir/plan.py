"""Plans, which hold every decision except the order: ranks of stages, cuts of batches, and weight versions."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TypeVar

from lightning_pipes.ir.checks import PlanError, check_count, check_fields, short_repr
from lightning_pipes.ir.instruction import NO_SPAN, Instruction, Kind, Span, even_spans, receive_of

Spans = tuple[Span, ...]
_T = TypeVar("_T")

_NO_SPANS: frozenset[Span] = frozenset()
_NONE_KEPT = (0, 1)  # the entry of `Plan.kept_microbatches` of a stage that recomputes all micro-batches, or none

MAX_STAGES = 2**12
"""The maximum number of stages in a plan and of devices in a cluster. It catches typos that would fill the memory."""
MAX_MICROBATCHES = 2**16
"""The maximum number of micro-batches in a batch. Each micro-batch holds at least one sample."""
MAX_FORWARDS = 2**18
"""The maximum number of forwards of a batch, summed over all stages. Ordering more takes gigabytes and minutes."""


@dataclass(frozen=True)
class Cut:
    """The spans into which stages and links cut each batch of one job.

    Attributes:
        rows: the number of samples in a batch.
        forward: for each stage, the spans of its forwards.
        backward: for each stage, the spans of its backwards. By default, they are equal to `forward`.
        forward_links: for each stage s, the spans of the messages from stage s to stage s + 1. By default, each message
            holds the samples of one forward of stage s.
        backward_links: for each stage s, the spans of the messages from stage s to stage s - 1. By default, each
            message holds the samples of one backward of stage s.
        replicas: for each stage and each of its forward spans, the index of the replica that computes it. Stages with
            several ranks require the same spans in forward and backward. If empty, the first replica of each stage
            computes everything.

    Raises:
        PlanError: if the spans of a stage or link leave a gap, overlap, or do not end at `rows`, or if there are more
            spans than can be ordered.
    """

    rows: int
    forward: tuple[Spans, ...]
    backward: tuple[Spans, ...] = ()
    forward_links: tuple[Spans, ...] = ()
    backward_links: tuple[Spans, ...] = ()
    replicas: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        try:
            self._check()
        except (TypeError, ValueError, AttributeError):  # check each of up to a million entries only after an error
            check_fields(self)
            raise

    def _check(self) -> None:
        check_fields(self, entries=False)
        check_count("rows of a batch", self.rows)
        if not self.forward:
            raise PlanError("forward of a cut needs spans for at least one stage, got none")
        object.__setattr__(self, "backward", self.backward or self.forward)
        object.__setattr__(self, "forward_links", self.forward_links or self.forward)
        object.__setattr__(self, "backward_links", self.backward_links or self.backward)
        if self.replicas:
            self._check_replicas()
        checked: set[int] = set()  # all stages usually share one tuple of spans
        for name in ("forward", "backward", "forward_links", "backward_links"):
            table: tuple[Spans, ...] = getattr(self, name)
            if len(table) != len(self.forward):
                raise PlanError(f"{name} has spans for {len(table)} stages, forward for {len(self.forward)}")
            _check_size(len(table), max(map(len, table), default=0))
            for stage, spans in enumerate(table):
                if id(spans) not in checked:
                    checked.add(id(spans))
                    self._check_cover(spans, f"{name} of stage {stage}")

    def _check_replicas(self) -> None:
        if [len(each) for each in self.replicas] != [len(spans) for spans in self.forward]:
            raise PlanError(
                f"replicas {short_repr(self.replicas)} must name a replica for each forward span of each stage"
            )
        if self.backward != self.forward:
            raise PlanError("if stages have several ranks, a backward must have the spans of its forward")

    def _check_cover(self, spans: Spans, where: str) -> None:
        at = 0
        for span in spans:
            if span.start != at or span.stop <= span.start:
                raise PlanError(f"{where}: {span} should start at sample {at} and hold at least one; got {spans}")
            at = span.stop
        if at != self.rows:
            raise PlanError(f"{where}: the spans end at sample {at}, the batch has {short_repr(self.rows)}")

    @classmethod
    def even(cls, rows: int, microbatches: int, stages: int) -> Cut:
        """Return a cut of the batch into even spans, which are the same for all stages and links.

        The cut has fewer than `microbatches` spans if the batch has fewer samples.

        Raises:
            PlanError: if a number is less than 1, or if there are more forwards than can be ordered.
        """
        check_count("rows of a batch", rows)
        check_count("microbatches", microbatches)
        check_count("stages", stages, most=MAX_STAGES)
        _check_size(1, microbatches)  # reject typos even if the batch has few samples
        _check_size(stages, min(rows, microbatches))
        return cls(rows, (even_spans(rows, min(rows, microbatches)),) * stages)

    @property
    def distinct_spans(self) -> frozenset[Spans]:
        """The distinct span tuples of all stages and links; a single one if all of them cut a batch in the same way."""
        return frozenset((*self.forward, *self.backward, *self.forward_links, *self.backward_links))

    def spans(self, kind: Kind, stage: int) -> Spans:
        """Return the spans of all instructions of one kind on one stage, in the order of samples.

        A STEP has no spans, so the result for it is empty.
        """
        match kind:
            case Kind.F:
                return self.forward[stage]
            case Kind.B | Kind.I | Kind.W | Kind.R:
                return self.backward[stage]
            case Kind.SF:
                return self.forward_links[stage]
            case Kind.RF:
                return self.forward_links[stage - 1]
            case Kind.SB:
                return self.backward_links[stage]
            case Kind.RB:
                return self.backward_links[stage + 1]
            case _:
                return ()


def _is_uniform(cut: Cut) -> bool:
    first = cut.forward[0]
    tables = (cut.forward, cut.backward, cut.forward_links, cut.backward_links)
    different = {id(spans): spans for table in tables for spans in table}  # all stages usually share one tuple
    return all(spans == first for spans in different.values())


def _tuple_from_sequence(name: str, values: Sequence[_T]) -> tuple[_T, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise PlanError(f"{name} must be a list, got {short_repr(values)}")
    return tuple(values)


def _check_size(stages: int, microbatches: int) -> None:
    if microbatches > MAX_MICROBATCHES or stages * microbatches > MAX_FORWARDS:
        raise PlanError(
            f"{short_repr(microbatches)} micro-batches on {stages} stage{'s' * (stages > 1)} are more than can be "
            "ordered: "
            f"at most {MAX_MICROBATCHES} micro-batches, and {MAX_FORWARDS} forwards on all stages; use fewer "
            "micro-batches"
        )


@dataclass(frozen=True)
class Plan:
    """Everything that a schedule needs to order the work of a window.

    Attributes:
        ranks: the rank that holds each stage. Neighboring stages on the same rank exchange no messages.
        jobs: the cut of each job's batches. There is one job unless siblings share the pipeline.
        batches: the number of batches per job in a finite window.
        versions: the number of weight versions that may exist on each stage at the same time. With 1, the forward of a
            batch waits for the update of the previous batch. With v, the forward may run v - 1 updates early.
        shared_weights: whether all batches of a job read and update the same weights. If they do not, as with subnets,
            `after` defines which batch waits for which, and `versions` is ignored.
        limits: for each stage, the maximum number of samples that it may hold between F and B. If empty, there is no
            limit.
        split_backward: whether the backward runs as I and W instead of B.
        recompute: for each stage, whether it keeps only its input and runs the forward again before the backward. If
            empty, no stage does this.
        layers: the layers of each stage, as spans of layer numbers. It is empty if the layers were not specified.
        after: additional instructions that an instruction waits for, besides its data dependencies. Use it for orders
            that a paper requires.
        whole_forward: for each stage, whether each forward runs in one piece even if the backward is cut more finely.
            Such a stage keeps its input, and each backward runs the forward of its own samples again. On other stages,
            the forward runs in one piece for each backward that its samples belong to. If empty, no stage does this.
            See `ir.passes`.
        replicas: for each stage, all of its ranks, if stages have several ranks and share out the samples among them.
            The first rank is the one in `ranks`. `Cut.replicas` specifies which of them computes a span. If empty, each
            stage has one rank.
        early_recompute: whether the forward that a stage runs again is an instruction R of its own, which does not wait
            for the gradient. If False, it is the first part of the backward (B or I).
        kept_microbatches: for each stage, a pair (a, n), if it recomputes: the first a of every n consecutive
            micro-batches of a batch keep their activations, and the stage recomputes only the others. If a stage has
            several ranks, each of them counts its own micro-batches. If empty or (0, 1), all are recomputed.

    Raises:
        PlanError: if the fields contradict each other.
    """

    ranks: tuple[int, ...]
    jobs: tuple[Cut, ...]
    batches: int = 1
    versions: tuple[int, ...] = ()
    shared_weights: bool = True
    limits: tuple[int, ...] = ()
    split_backward: bool = False
    recompute: tuple[bool, ...] = ()
    layers: tuple[Span, ...] = ()
    after: Mapping[Instruction, tuple[Instruction, ...]] = field(default_factory=dict, hash=False)
    whole_forward: tuple[bool, ...] = ()
    replicas: tuple[tuple[int, ...], ...] = ()
    early_recompute: bool = False
    kept_microbatches: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        try:
            self._check()
        except (TypeError, ValueError, AttributeError):
            check_fields(self)
            raise

    def _check(self) -> None:
        check_fields(self, entries=False)
        n = len(self.ranks)
        if n == 0 or not self.jobs:
            raise PlanError(
                f"a plan needs ranks, one for each stage, and jobs; got {n} ranks and {len(self.jobs)} jobs"
            )
        if n > MAX_STAGES:
            raise PlanError(f"a plan has at most {MAX_STAGES} stages, got {n}")
        if self.replicas:
            self._check_replicas()
        elif max(self.ranks) >= n or set(self.ranks) != set(range(max(self.ranks) + 1)):
            raise PlanError(f"ranks {self.ranks} leave a rank without a stage; number them 0 to n - 1")
        if not self.versions:
            object.__setattr__(self, "versions", (1,) * n)
        for name in ("versions", "limits", "recompute", "layers", "whole_forward", "kept_microbatches"):
            got = len(getattr(self, name))
            if got not in (0, n):
                raise PlanError(f"{name} has {got} entries for {n} stages")
        check_count("batches", self.batches)
        if not all(isinstance(each, bool) for each in (*self.recompute, *self.whole_forward)):
            raise TypeError
        if not all(isinstance(i, Instruction) for i in self.after):
            raise TypeError
        if min((span.rows for span in self.layers), default=0) < 0:
            raise PlanError(
                f"layers: a stage has its last layer after its first one, or none, got {short_repr(self.layers)}"
            )
        if not min(self.versions) >= 1 or not min(self.limits, default=0) >= 0:
            raise PlanError(
                f"versions start at 1 and limits at 0, got {short_repr(self.versions)} and {short_repr(self.limits)}"
            )
        if self.whole_forward and self.whole_forward[-1]:
            raise PlanError(
                f"whole_forward {self.whole_forward} is True for the last stage, which does not need a forward in one "
                "piece because it sends no activation and its backwards run the forward again. Set it to False for "
                "this stage"
            )
        for number, cut in enumerate(self.jobs):
            if len(cut.forward) != n:
                raise PlanError(f"job {number} is cut for {len(cut.forward)} stages, but the plan has {n}")
        if self.kept_microbatches:
            self._check_kept_microbatches()

    def _check_kept_microbatches(self) -> None:
        found = []
        for stage, (kept, every) in enumerate(self.kept_microbatches):
            if type(kept) is not int or type(every) is not int:
                raise TypeError
            if not (every >= 1 and 0 <= kept < every):
                raise PlanError(
                    f"kept_microbatches of stage {stage} is ({short_repr(kept)}, {short_repr(every)}), but a pair "
                    "(a, n) needs 0 <= a < n, because the first a of every n micro-batches keep their activations. To "
                    "keep all of them, set recompute of this stage to False"
                )
            used = kept > 0 and bool(self.recompute) and self.recompute[stage]
            found.append((kept, every) if used else _NONE_KEPT)
            if not used:
                continue
            if self.whole_forward and self.whole_forward[stage]:
                raise PlanError(
                    f"stage {stage} keeps {kept} of {every} micro-batches, but whole_forward makes it recompute all of "
                    "them. Set whole_forward of this stage to False, or its kept_microbatches to (0, 1)"
                )
            if any(cut.forward[stage] != cut.backward[stage] for cut in self.jobs):
                raise PlanError(
                    f"stage {stage} keeps {kept} of {every} micro-batches, but its backwards cut a batch differently "
                    "from its forwards, so that a backward could need both. Use the same spans in forward and "
                    "backward, or set kept_microbatches of this stage to (0, 1)"
                )
        object.__setattr__(self, "kept_microbatches", tuple(found) if any(kept for kept, _ in found) else ())

    def _check_replicas(self) -> None:
        every = sorted(rank for ranks in self.replicas for rank in ranks)
        if self.ranks != tuple(ranks[0] for ranks in self.replicas if ranks) or every != list(range(len(every))):
            raise PlanError(
                f"replicas {self.replicas} must assign different ranks to the stages, numbered from 0 to n - 1, and "
                f"the first rank of each stage must be its rank in ranks, {self.ranks}"
            )
        for cut in self.jobs:
            for ranks, numbers in zip(self.replicas, cut.replicas, strict=False):
                if numbers and not 0 <= min(numbers) <= max(numbers) < len(ranks):
                    raise PlanError(f"a cut names replicas {numbers} of a stage with {len(ranks)} ranks")

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # without cached properties

    @cached_property
    def _hash(self) -> int:  # cached because plans hold thousands of spans and are looked up in every step
        return hash(tuple(getattr(self, f.name) for f in fields(self) if f.name != "after"))

    @classmethod
    def even(
        cls,
        stages: int,
        microbatches: int,
        rows: int | None = None,
        ranks: Sequence[int] | None = None,
        layers: Sequence[Span] = (),
        recompute: Sequence[bool] = (),
    ) -> Plan:
        """Return a plan of one batch, cut evenly and in the same way on all stages.

        Args:
            stages: the number of stages.
            microbatches: the number of micro-batches; fewer are used if the batch has fewer samples.
            rows: the number of samples in the batch. The default is one sample per micro-batch.
            ranks: the rank of each stage. By default, stage s is on rank s.
            layers: the layers of each stage, see `Plan.layers`.
            recompute: whether each stage recomputes its activations, see `Plan.recompute`.

        Raises:
            PlanError: if the arguments do not fit together or exceed a limit.
        """
        check_count("microbatches", microbatches)
        cut = Cut.even(microbatches if rows is None else rows, microbatches, stages)
        where = tuple(range(stages)) if ranks is None else _tuple_from_sequence("ranks", ranks)
        if len(where) != stages:
            raise PlanError(f"ranks must name the rank of each of {stages} stages, got {short_repr(ranks)}")
        return cls(
            where,
            (cut,),
            layers=_tuple_from_sequence("layers", layers),
            recompute=_tuple_from_sequence("recompute", recompute),
        )

    @property
    def n_stages(self) -> int:
        """The number of stages on all ranks together."""
        return len(self.ranks)

    @cached_property
    def n_ranks(self) -> int:
        """The number of ranks."""
        return max(rank for ranks in self.ranks_of_stages for rank in ranks) + 1

    @cached_property
    def ranks_of_stages(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, all ranks that hold it."""
        return self.replicas or tuple((rank,) for rank in self.ranks)

    @cached_property
    def compute_kinds(self) -> tuple[Kind, ...]:
        """The kinds of computations that a micro-batch needs: the forward, and the full or the split backward."""
        return (Kind.F, Kind.I, Kind.W) if self.split_backward else (Kind.F, Kind.B)

    def kinds_of_stage(self, stage: int) -> tuple[Kind, ...]:
        """Return the kinds of computations of the micro-batches on a stage, in order, with the recomputation if any."""
        forward, *backward = self.compute_kinds
        again = self.early_recompute and any(self.recomputed_share(stage, job) for job in range(len(self.jobs)))
        return (forward, *(Kind.R,) * again, *backward)

    def recomputes(self, stage: int, job: int, span: Span) -> bool:
        """Return whether a stage keeps only the input of a micro-batch and runs its forward again."""
        if not self.recompute or not self.recompute[stage]:
            return False
        return not self.kept_microbatches or span not in self.kept_spans(stage, job)

    def recomputes_all(self, stage: int) -> bool:
        """Return whether a stage recomputes every micro-batch, so that it keeps nothing but inputs."""
        if not self.recompute or not self.recompute[stage]:
            return False
        return not self.kept_microbatches or not self.kept_microbatches[stage][0]

    def kept_spans(self, stage: int, job: int = 0) -> frozenset[Span]:
        """Return the micro-batches whose activations a stage keeps according to `kept_microbatches`."""
        if not self.kept_microbatches or not self.kept_microbatches[stage][0]:
            return _NO_SPANS
        found = self._kept_spans.get((stage, job))
        if found is None:
            cut, (kept, every) = self.jobs[job], self.kept_microbatches[stage]
            spans = cut.forward[stage]
            counts: Counter[int] = Counter()
            members = []
            for span, replica in zip(spans, cut.replicas[stage] if cut.replicas else (0,) * len(spans), strict=True):
                if counts[replica] % every < kept:
                    members.append(span)
                counts[replica] += 1
            found = self._kept_spans[stage, job] = frozenset(members)
        return found

    @cached_property
    def _kept_spans(self) -> dict[tuple[int, int], frozenset[Span]]:
        return {}

    def recomputed_share(self, stage: int, job: int = 0) -> float:
        """Return the share of the samples of a batch for which a stage runs its forward again."""
        if not self.recompute or not self.recompute[stage]:
            return 0.0
        return 1.0 - sum(span.rows for span in self.kept_spans(stage, job)) / self.jobs[job].rows

    def rank_of(self, i: Instruction) -> int:
        """Return the rank that runs `i`."""
        if not self.replicas:
            return self.ranks[i.stage]
        return self.replicas[i.stage][self.replica_of(i)]

    def replica_of(self, i: Instruction) -> int:
        """Return the index of the replica that runs `i`, which is the replica that computes its samples.

        The STEP of replica r has the empty span r:r.
        """
        if i.kind is Kind.STEP:
            return i.span.start
        cut = self.jobs[i.job]
        if not self.replicas or not cut.replicas:
            return 0
        spans = cut.forward[i.stage]
        return cut.replicas[i.stage][bisect_right(spans, i.span.start, key=lambda span: span.start) - 1]

    def step_span(self, i: Instruction) -> Span:
        """Return the span of the STEP on the rank that runs `i`."""
        if not self.replicas:
            return NO_SPAN
        replica = self.replica_of(i)
        return Span(replica, replica)

    def target_rank(self, send: Instruction) -> int:
        """Return the rank that receives the message of `send`."""
        return self.rank_of(receive_of(send))

    def local_spans(self, kind: Kind, stage: int, rank: int, job: int = 0) -> Spans:
        """Return the spans of all instructions of one kind on one stage that `rank` runs for one batch of `job`."""
        spans = self.spans(kind, stage, job)
        if not self.replicas:
            return spans
        return tuple(span for span in spans if self.rank_of(Instruction(kind, stage, job, 0, span)) == rank)

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """For each rank, the stages that it holds in ascending order."""
        where = self.ranks_of_stages
        return tuple(tuple(s for s, ranks in enumerate(where) if rank in ranks) for rank in range(self.n_ranks))

    def spans(self, kind: Kind, stage: int, job: int = 0) -> Spans:
        """Return the spans of all instructions of one kind on one stage for one batch of `job`.

        For R, they include micro-batches that the stage does not recompute; see `recomputes`.
        """
        return self.jobs[job].spans(kind, stage)

    @cached_property
    def uniform_jobs(self) -> tuple[bool, ...]:
        """For each job, whether all stages and links cut its batches in the same way."""
        return tuple(map(_is_uniform, self.jobs))

    def is_remote_edge(self, stage: int) -> bool:
        """Return whether `stage` and `stage + 1` are on different ranks and therefore exchange messages."""
        return self.ranks[stage] != self.ranks[stage + 1]

    @cached_property
    def directed_links(self) -> tuple[tuple[int, int, Kind], ...]:
        """All (source rank, destination rank, SF or SB) that carry messages. The order is the same on all ranks."""
        where = self.ranks_of_stages
        edges = [s for s in range(self.n_stages - 1) if self.is_remote_edge(s)]
        pairs = {(a, b) for s in edges for a in where[s] for b in where[s + 1]}
        return tuple(sorted([(a, b, Kind.SF) for a, b in pairs] + [(b, a, Kind.SB) for a, b in pairs]))

    def overlapping_spans(self, kind: Kind, stage: int, job: int, span: Span) -> Spans:
        """Return the spans of `kind` on `stage` that have samples in common with `span`."""
        key = (kind, stage, job, span)
        found = self._overlaps.get(key)
        if found is None:
            spans = self.spans(kind, stage, job)
            members = self._span_sets.get((kind, stage, job))
            if members is None:
                members = self._span_sets[kind, stage, job] = frozenset(spans)
            found = (span,) if span in members else tuple(s for s in spans if s.overlaps(span))
            self._overlaps[key] = found
        return found

    @cached_property
    def _overlaps(self) -> dict[tuple[Kind, int, int, Span], Spans]:
        return {}

    @cached_property
    def _span_sets(self) -> dict[tuple[Kind, int, int], frozenset[Span]]:
        return {}
