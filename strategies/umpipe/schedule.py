"""Orders for a batch that every stage, direction and link cuts in its own way."""

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
from lightning_pipes.strategies.umpipe.planner import AMONG, SEARCHES, Counts, UnequalPlanner

WIDEST = 16
"""Micro-batches for each rank from which on more are hardly ever of use."""
LARGEST = 2048
"""Micro-batches on all ranks, of the largest plan that a search over schedules has cut unequally."""


@dataclass(frozen=True)
class UnequalMicrobatches(ScheduleTraits):
    """The settings of both orders: how many micro-batches each stage makes of a batch, and each link in messages.

    Where it is not set, the planner decides by what layers and links take: see `UnequalPlanner`.

    Attributes:
        forward: micro-batches of each stage, 1 to the samples of a batch; p of them have ceil(P / p) of P samples each,
            the last one what is left. A batch with fewer samples has one for each.
        backward: the same for backwards; as forward where it is empty.
        forward_links: messages on each link to the next stage; as the stage before it computes where it is empty.
        backward_links: messages on each link back.
        counts: the numbers that the planner chooses from: few (1, 2, 3, 4, 6, 8, 12, ...), powers of two, or all.

    Raises:
        InputError: a number below 1; backward or links without forward; other counts than these.
    """

    forward: tuple[int, ...] = ()
    backward: tuple[int, ...] = ()
    forward_links: tuple[int, ...] = ()
    backward_links: tuple[int, ...] = ()
    counts: str = AMONG[0]

    def __post_init__(self) -> None:
        check_fields(self)
        if self.counts not in AMONG:
            raise InputError(f"{self.name}: counts must be one of {', '.join(AMONG)}, got {short_repr(self.counts)}")
        for what in ("forward", "backward", "forward_links", "backward_links"):
            counts = getattr(self, what)
            if min(counts, default=1) < 1:
                raise InputError(f"{self.name}: {what} counts micro-batches from 1, got {counts}")
            if counts and not self.forward:
                raise InputError(f"{self.name}: {what} is {counts}, and forward is missing; give both, or neither")

    @property
    def given_counts(self) -> Counts | None:
        """The counts that the user has named."""
        if not self.forward:
            return None
        return Counts(self.forward, self.backward or self.forward, self.forward_links, self.backward_links)


@dataclass(frozen=True)
class UMPipe(UnequalMicrobatches, Schedule):
    """All forwards, then all backwards, each stage with micro-batches of its own: UMPIPE (section III), of which GPipe
    is the case that all are equal.

    Every stage holds the whole batch before its first backward, however it is cut.

    Attributes:
        search: how the planner finds a cut: "exact" proves it, "genetic" is the paper's TiDGAP (section IV).

    Raises:
        InputError: there is no such search.
        PlanError: there is more than one batch of one job to order.
    """

    search: str = SEARCHES[0]
    name: ClassVar[str] = "umpipe"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.search not in SEARCHES:
            raise InputError(f"{self.name}: search must be one of {', '.join(SEARCHES)}, got {short_repr(self.search)}")

    @classmethod
    def list_variants(cls, n_ranks: int, microbatches: int) -> list[UMPipe]:
        """None: `um1f1b` does the same with overlapped directions."""
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
    """Backwards as soon as they are ready, else forwards, each stage with micro-batches of its own: the paper's
    UMPipeDream (section V-E) with one update a batch.

    A stage holds as many samples between F and B as fit into its device's memory, and into `memory_limit`; without a
    limit up to the whole batch.

    With several stages a rank, handed out in turn as by `interleaved`, the bubble is smaller, and each of them has
    micro-batches of its own: it takes as many layers as there are stages.

    Attributes:
        memory_limit: bytes that every rank may hold, such as "16GiB".
        stages_per_rank: rank r of p holds the stages r, r + p, r + 2 p, ...
    """

    memory_limit: int | str | None = None
    stages_per_rank: int = 1
    name: ClassVar[str] = "um1f1b"

    @classmethod
    def list_variants(cls, n_ranks: int, microbatches: int) -> list[UM1F1B]:
        """Return variants with one and two stages a rank, where there are enough numbers of micro-batches to choose
        from; of large plans none, for a search among their cuts takes minutes."""
        enough = WIDEST * n_ranks // 2 <= microbatches < WIDEST * n_ranks
        return [cls(), cls(stages_per_rank=2)] if enough and n_ranks * microbatches <= LARGEST else []

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
