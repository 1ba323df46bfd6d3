"""The schedule "interleaved": 1F1B with several stages per rank."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain
from typing import ClassVar

from lightning_pipes.ir import (
    MAX_STAGES,
    STEP,
    B,
    F,
    Instruction,
    Kind,
    Plan,
    PlanError,
    Program,
    Schedule,
    Span,
    check_count,
    check_one_batch,
    check_placement,
    even_spans,
)


@dataclass(frozen=True)
class Interleaved(Schedule):
    """1F1B with `stages_per_rank` stages on every rank, assigned in turn (Narayanan et al. 2021, arXiv:2104.04473,
    S2.2).

    Rank r of p has the stages r, r + p, r + 2p, ... Let there be v stages per rank and m micro-batches, where m is a
    multiple of p, and let f and b be the times of a whole rank. Then the bubble shrinks from (p - 1)(f + b) to (p -
    1)(f + b) / v, and v times as many messages are sent. Other values of m work, too, with rounds of more than p
    micro-batches.

    Attributes:
        stages_per_rank: the number of stages of every rank.

    Raises:
        PlanError: `stages_per_rank` is not an integer of at least 1, the plan places stages on other ranks, spans
            differ between stages or directions, or the plan has several jobs, several batches or a split backward.
    """

    stages_per_rank: int = 2
    name: ClassVar[str] = "interleaved"

    def __post_init__(self) -> None:
        check_count(f"{self.name}: stages_per_rank", self.stages_per_rank, most=MAX_STAGES)

    @classmethod
    def list_variants(cls, n_ranks: int, microbatches: int) -> list[Interleaved]:
        """Return the variants that a planner tries: 2, 3 and 4 stages per rank."""
        return [cls(v) for v in (2, 3, 4)]

    def place_stages(self, n_ranks: int) -> tuple[int, ...]:
        """Return the rank of each stage."""
        check_count(f"{self.name}: stages of {n_ranks} ranks", self.stages_per_rank * n_ranks, most=MAX_STAGES)
        return tuple(range(n_ranks)) * self.stages_per_rank

    def program(self, plan: Plan) -> Program:
        check_one_batch(plan, self.name)
        check_placement(plan, self)
        return Program(tuple(self._order(plan, rank) for rank in range(plan.n_ranks)))

    # Drawn by `step(Interleaved(), ranks=2)`:
    # rank 0 |0-1-0'1'2-..0'==3-1'==2'0===3'1===..2'==..3'==2===3===| bubble 11.1%
    # rank 1 |..0-1-0'0'==1'1'==2-0===3-1===2'2'==3'3'==2===3===....| bubble 11.1%
    #         - forward  = backward  . idle
    def _order(self, plan: Plan, rank: int) -> tuple[Instruction, ...]:
        p, stages = plan.n_ranks, plan.stages[rank]
        spans = plan.spans(Kind.F, rank)
        if any(plan.spans(kind, s) != spans for s in stages for kind in (Kind.F, Kind.B)):
            raise PlanError(f"{self.name} needs the same spans on all stages, forward and backward")
        rounds = self._rounds(spans, p)
        forwards = [F(s, span) for group in rounds for s in stages for span in group]
        backwards = [B(s, span) for group in rounds for s in reversed(stages) for span in group]

        warmup = min(self._warmup(rank, p, rounds), len(forwards))
        row = forwards[:warmup]
        row += chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
        row += backwards[len(forwards) - warmup :]
        return (*row, *(STEP(s) for s in stages))

    @staticmethod
    def _rounds(spans: tuple[Span, ...], p: int) -> list[tuple[Span, ...]]:
        """Return the rounds: groups of micro-batches that all pass one stage of a rank before its next stage begins.

        A round has p micro-batches, or a few more if p does not divide m. A shorter last round could wait for its own
        micro-batches, which have not yet passed the other ranks when the next stage needs them.
        """
        sizes = sorted((c.rows for c in even_spans(len(spans), max(1, len(spans) // p))), reverse=True)
        ends = list(accumulate(sizes))
        return [spans[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def _warmup(self, rank: int, p: int, rounds: list[tuple[Span, ...]]) -> int:
        """Return the number of forwards before the first F-B pair.

        In this time, the first micro-batch passes all stages, and its gradient returns to this rank.
        """
        if self.stages_per_rank == 1:
            return p - 1 - rank
        return 2 * (p - 1 - rank) + (self.stages_per_rank - 1) * len(rounds[0])
