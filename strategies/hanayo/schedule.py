"""The schedule "hanayo": 1F1B through stages that are placed down the ranks and up again."""

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
    arXiv:2308.15762).

    Rank r of p has the stages r and 2p - 1 - r of every wave of 2p stages. At the turn of a wave, a rank passes the
    values to itself.

    Let there be w waves and m micro-batches, where m is a multiple of p, and let f and b be the times of a whole rank.
    On equal stages with free links, the bubble of this order is (p - 1) max(f, b) / w. Other values of m work, too.
    With this placement, no order has a smaller bubble than (p - 1)(f + b) / 2w, because the last rank begins p - 1
    stage forwards late and ends p - 1 stage backwards early.

    Attributes:
        waves: the number of times that the stages go down the ranks and up again.

    Raises:
        PlanError: `waves` is not an integer of at least 1, the plan places stages on other ranks, spans differ between
            stages or directions, or the plan has several jobs, several batches or a split backward.
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
            """Return the slot in which micro-batch n is computed on the stage at position `number` of its way."""
            number, n = way
            wave, within = divmod(number, 2 * p)
            start, length = slots[n]
            return start + wave * length + within

        ways = sorted([(number, n) for number in stages for n in range(len(spans))], key=time_slot)
        forwards = [F(number, spans[n]) for number, n in ways]
        ways = sorted([(last - s, n) for s in stages for n in range(len(spans))], key=time_slot)
        backwards = [B(last - number, spans[n]) for number, n in ways]

        # Forwards before the first F-B pair fill all waves but the last, and keep all ranks busy in the last one.
        warmup = min((self.waves - 1) * slots[0][1] + min(len(spans), 2 * p - 1) + rank, len(forwards))
        row = forwards[:warmup]
        row += chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
        row += backwards[len(forwards) - warmup :]
        return (*row, *(STEP(s) for s in stages))

    def _slots(self, m: int, p: int) -> list[tuple[int, int]]:
        """Return the slot in which each micro-batch starts, and the number of slots for which its round keeps a wave
        busy.

        A slot is the duration of a forward of one stage. In a wave, every rank has two stages, one in even slots and
        one in odd slots, so a micro-batch starts in every second slot. A round of p micro-batches fills a wave exactly,
        and when it leaves the last wave, the next round may enter the first one. If p does not divide m, rounds are
        slightly longer, and the first rounds are the longest.
        """
        slots, at = [], 0
        for rows in sorted((r.rows for r in even_spans(m, max(1, m // p))), reverse=True):
            length = 2 * max(p, rows)
            slots += [(at + 2 * k, length) for k in range(rows)]
            at += self.waves * length
        return slots
