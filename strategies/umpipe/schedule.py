"""Schedules that cut a batch differently for each stage, direction and link."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_pipes.cost.units import parse_bytes
from lightning_pipes.ir import (
    MAX_STAGES,
    STEP,
    B,
    F,
    InputError,
    Kind,
    Plan,
    Program,
    Rule,
    RulePolicy,
    Schedule,
    ScheduleTraits,
    check_count,
    check_fields,
    check_one_batch,
    short_repr,
)
from lightning_pipes.strategies.umpipe.planner import MICROBATCH_CHOICES, SEARCH_METHODS, Counts, UnequalPlanner

MAX_MICROBATCHES_PER_RANK = 16
"""The number of micro-batches per rank from which a further increase hardly ever helps."""
MAX_UNEQUAL_MICROBATCHES = 2048
"""The maximum number of micro-batches, summed over all ranks, of plans that a search over schedules cuts unequally."""


@dataclass(frozen=True)
class UnequalMicrobatches(ScheduleTraits):
    """Settings of both schedules: the number of micro-batches of each stage, and the number of messages on each link.

    If `forward` is empty, the planner chooses the numbers from the times of layers and links; see `UnequalPlanner`.

    Attributes:
        forward: the number of micro-batches of each stage, from 1 to the number of samples in a batch. With p
            micro-batches of a batch of P samples, each has ceil(P / p) samples, except for the last one, which has the
            rest. If a batch has fewer samples than p, each sample is a micro-batch.
        backward: the same for backwards. If it is empty, they have the micro-batches of `forward`.
        forward_links: the number of messages on each link to the next stage. If it is empty, a link sends the
            micro-batches of the stage before it.
        backward_links: the number of messages on each link to the previous stage.
        counts: the numbers of micro-batches among which the planner chooses: "few" (1, 2, 3, 4, 6, 8, 12, ...),
            "powers" (of two), or "all".

    Raises:
        InputError: a number is below 1, backward or links are given without forward, or `counts` is unknown.
    """

    forward: tuple[int, ...] = ()
    backward: tuple[int, ...] = ()
    forward_links: tuple[int, ...] = ()
    backward_links: tuple[int, ...] = ()
    counts: str = MICROBATCH_CHOICES[0]

    def __post_init__(self) -> None:
        check_fields(self)
        if self.counts not in MICROBATCH_CHOICES:
            raise InputError(
                f"{self.name}: counts must be one of {', '.join(MICROBATCH_CHOICES)}, got {short_repr(self.counts)}"
            )
        for what in ("forward", "backward", "forward_links", "backward_links"):
            counts = getattr(self, what)
            if min(counts, default=1) < 1:
                raise InputError(f"{self.name}: every number in {what} must be at least 1, got {counts}")
            if counts and not self.forward:
                raise InputError(f"{self.name}: {what} is {counts}, and forward is missing; give both, or neither")

    @property
    def given_counts(self) -> Counts | None:
        """The numbers of micro-batches that the user has set, or None."""
        if not self.forward:
            return None
        return Counts(self.forward, self.backward or self.forward, self.forward_links, self.backward_links)


@dataclass(frozen=True)
class UMPipe(UnequalMicrobatches, Schedule):
    """All forwards, then all backwards, with separate micro-batches for each stage: UMPIPE (section III).

    GPipe is the case in which all micro-batches are equal. Every stage holds the whole batch before its first backward,
    for every cut.

    Attributes:
        search: how the planner searches for a cut. "exact" also proves how good the cut is, and "genetic" is the
            paper's TiDGAP (section IV).

    Raises:
        InputError: the search is unknown.
        PlanError: the plan has several batches or several jobs.
    """

    search: str = SEARCH_METHODS[0]
    name: ClassVar[str] = "umpipe"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.search not in SEARCH_METHODS:
            raise InputError(
                f"{self.name}: search must be one of {', '.join(SEARCH_METHODS)}, got {short_repr(self.search)}"
            )

    @classmethod
    def list_variants(cls, n_ranks: int, microbatches: int) -> list[UMPipe]:
        """Return an empty list, because `um1f1b` has the same cuts with overlapping directions."""
        return []

    def make_planner(self) -> UnequalPlanner:
        return UnequalPlanner(self.given_counts, False, self.counts, search=self.search)

    # Drawn by `unequal("umpipe")`:
    # rank 0 |0---1---..............0===1===2===3===| bubble 36.8%
    # rank 1 |....0-1-2-3-......0===1===2===3===....| bubble 36.8%
    # rank 2 |......--------0=1=2=3=4=5=6=7=........| bubble 36.8%
    #         - forward  = backward  . idle
    def program(self, plan: Plan) -> Program:
        check_one_batch(plan, self.name)
        rows = []
        for stages in plan.stages:
            forwards = [F(s, span) for s in stages for span in plan.spans(Kind.F, s)]
            backwards = [B(s, span) for s in reversed(stages) for span in plan.spans(Kind.B, s)]
            rows.append((*forwards, *backwards, *map(STEP, stages)))
        return Program(tuple(rows))


@dataclass(frozen=True)
class UM1F1B(UnequalMicrobatches, RulePolicy):
    """Backwards as soon as they are ready, otherwise forwards, with separate micro-batches for each stage.

    This is the paper's UMPipeDream (section V-E) with one update per batch. Between F and B, a stage holds as many
    samples as fit into the memory of its device and into `memory_limit`. Without any limit, it may hold the whole
    batch.

    If each rank has several stages, they are assigned in turn, as in `interleaved`. This makes the bubble smaller and
    gives each stage separate micro-batches. The model must have at least as many layers as there are stages.

    Attributes:
        memory_limit: the bytes that every rank may hold, such as "16GiB".
        stages_per_rank: the number of stages per rank. Rank r of p holds the stages r, r + p, r + 2 p, ...
    """

    memory_limit: int | str | None = None
    stages_per_rank: int = 1
    name: ClassVar[str] = "um1f1b"

    @classmethod
    def list_variants(cls, n_ranks: int, microbatches: int) -> list[UM1F1B]:
        """Return variants with one and two stages per rank.

        The list is empty unless there are `MAX_MICROBATCHES_PER_RANK` / 2 to `MAX_MICROBATCHES_PER_RANK` micro-batches
        per rank. It is also empty for large plans, because the search among their cuts takes minutes.
        """
        enough = MAX_MICROBATCHES_PER_RANK * n_ranks // 2 <= microbatches < MAX_MICROBATCHES_PER_RANK * n_ranks
        return [cls(), cls(stages_per_rank=2)] if enough and n_ranks * microbatches <= MAX_UNEQUAL_MICROBATCHES else []

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(f"{self.name}: stages_per_rank", self.stages_per_rank, most=MAX_STAGES)
        if self.memory_limit is not None:
            parse_bytes(self.memory_limit)

    def place_stages(self, n_ranks: int) -> tuple[int, ...]:
        """Return the rank of each stage."""
        check_count(f"{self.name}: stages of {n_ranks} ranks", self.stages_per_rank * n_ranks, most=MAX_STAGES)
        return tuple(range(n_ranks)) * self.stages_per_rank

    def make_planner(self) -> UnequalPlanner:
        limit = None if self.memory_limit is None else parse_bytes(self.memory_limit)
        return UnequalPlanner(self.given_counts, True, self.counts, limit)

    # Drawn by `unequal("um1f1b")`:
    # rank 0 |0---1---........0===..1===..2===..3===| bubble 36.8%
    # rank 1 |....0-1-2-3-0===..1===..2===..3===....| bubble 36.8%
    # rank 2 |......-0=-1=-2=-3=-4=-5=-6=-7=........| bubble 36.8%
    #         - forward  = backward  . idle
    def rule(self, plan: Plan) -> Rule:
        check_one_batch(plan, self.name)
        return Rule(alternate=False)
