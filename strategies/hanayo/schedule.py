"""1F1B through stages that go down the ranks and up again."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
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
class Hanayo(Schedule):
    """1F1B with 2 `waves` stages on every rank, placed down the ranks and up again `waves` times (Liu et al. 2023,
    arXiv:2308.15762): rank r of p holds the stages r and 2p - 1 - r of every wave of 2p stages. Where a wave turns, a
    rank hands over to itself.

    For w waves, m micro-batches in multiples of p, f and b the times of a whole rank, equal stages and free links the
    bubble of this order is (p - 1) max(f, b) / w; any m works. The ramps alone take (p - 1)(f + b) / 2w with such a
    placement, for the last rank begins p - 1 forwards late and ends p - 1 backwards early: no order has less.

    Raises:
        PlanError: waves is no whole number from 1 on, the plan places stages otherwise, spans differ between stages or
            directions, or there is more than one batch of one job to order.
    """

    waves: int = 1
    name: ClassVar[str] = "hanayo"

    def __post_init__(self) -> None:
        check_count(f"{self.name}: waves", self.waves, most=MAX_STAGES)

    def place_stages(self, n_ranks: int) -> tuple[int, ...]:
        """Return the rank of each stage."""
        check_count(f"{self.name}: stages of {n_ranks} ranks", 2 * self.waves * n_ranks, most=MAX_STAGES)
        down = tuple(range(n_ranks))
        return (down + down[::-1]) * self.waves

    def program(self, plan: Plan) -> Program:
        check_one_batch(plan, self.name)
        check_placement(plan, self)
        spans = plan.spans(Kind.F, 0)
        if any(plan.spans(kind, s) != spans for s in range(plan.n_stages) for kind in (Kind.F, Kind.B)):
            raise PlanError(f"{self.name} needs the same spans on all stages, forward and backward")
        return Program(tuple(self._order(plan, rank, spans) for rank in range(plan.n_ranks)))

    # Drawn by `step(Hanayo(), ranks=2)`:
    # rank 0 |0-1-..0'2-0'==1'1'==3-..0===2'2'==3'1===3'==2===....3===| bubble 14.3%
    # rank 1 |..0-0'1-1'2-..0'==2'0===3-1'==3'1===2'==2===3'==3===....| bubble 14.3%
    #         - forward  = backward  . idle
    def _order(self, plan: Plan, rank: int, spans: tuple[Span, ...]) -> tuple[Instruction, ...]:
        p, stages, last = plan.n_ranks, plan.stages[rank], plan.n_stages - 1
        slots = self._slots(len(spans), p)

        def time_slot(way: tuple[int, int]) -> int:
            """Return when micro-batch n is at the stage that comes as `number` on its way."""
            number, n = way
            wave, within = divmod(number, 2 * p)
            start, length = slots[n]
            return start + wave * length + within

        ways = sorted([(number, n) for number in stages for n in range(len(spans))], key=time_slot)
        forwards = [F(number, spans[n]) for number, n in ways]
        ways = sorted([(last - s, n) for s in stages for n in range(len(spans))], key=time_slot)
        backwards = [B(last - number, spans[n]) for number, n in ways]

        # Before the first F-B pair: what fills the waves but the last, and in that one as many as keep all ranks busy.
        warmup = min((self.waves - 1) * slots[0][1] + min(len(spans), 2 * p - 1) + rank, len(forwards))
        row = forwards[:warmup]
        row += chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
        row += backwards[len(forwards) - warmup :]
        return (*row, *(STEP(s) for s in stages))

    def _slots(self, m: int, p: int) -> list[tuple[int, int]]:
        """If a forward took one slot: when each micro-batch starts, and how long its round keeps a wave busy.

        In a wave every rank has two stages, one in even and one in odd slots, so micro-batches start every second
        slot. A round of p of them fills a wave exactly, and when it leaves the last wave the next round may enter the
        first. Where p does not divide m rounds are a little longer, the first ones most.
        """
        slots, at = [], 0
        for rows in sorted((r.rows for r in even_spans(m, max(1, m // p))), reverse=True):
            length = 2 * max(p, rows)
            slots += [(at + 2 * k, length) for k in range(rows)]
            at += self.waves * length
        return slots
