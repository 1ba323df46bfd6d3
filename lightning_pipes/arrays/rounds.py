"""Rounds of a job array: a batch of every sibling in a given order of blocks, nobody's next one before all are over.

Siblings hand in their batches first, and nothing is computed meanwhile; then each rank computes its row of the order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from lightning_pipes.arrays.siblings.sibling import Sibling
from lightning_pipes.ir import Kind, PlanError, Program

RoundOrder = Callable[[tuple[int, ...], int], Program]
"""The order of one batch of each of some jobs: from the rows of their batches, and the number of stages."""


S = TypeVar("S", bound=Sibling[Any])


class Rounds(Generic[S]):
    """The order of computations on this rank.

    Attributes:
        turns_left: siblings that have a turn yet before the round is computed.
    """

    def __init__(self, order: RoundOrder) -> None:
        self.turns_left = 0
        self._order = order
        self._row: deque[tuple[S, Kind]] = deque()

    def begin_round(self, siblings: Sequence[S]) -> None:
        """Begin a round after all siblings have handed in their batches; ended and failing ones have none.

        Raises:
            PlanError: a batch is cut into micro-batches.
        """
        working = [(s, s.engine) for s in siblings if s.engine is not None]
        for _, engine in working:
            cut = engine.plan.jobs[0]
            if len(cut.forward[0]) > 1:
                raise PlanError(
                    f"an array in rounds runs whole batches, and a sibling cuts its own into {len(cut.forward[0])}; "
                    "set microbatches=1, or leave rounds out"
                )
        if not working:
            return
        plan, rank = working[0][1].plan, working[0][1].rank
        program = self._order(tuple(engine.plan.jobs[0].rows for _, engine in working), plan.n_stages)
        self._row.extend(
            (working[i.job][0], i.kind)
            for stage in plan.stages[rank]
            for i in program.head[stage]
            if i.kind is not Kind.STEP
        )

    def end_round(self, turns: int) -> None:
        """End the round; so many turns come before the next one."""
        self.turns_left = turns
        self._row.clear()

    def next_sibling(self) -> S | None:
        """Return the sibling of the next block; None where it has to wait, or nothing is left."""
        while self._row:
            sibling, kind = self._row[0]
            engine = sibling.engine
            over = sibling.is_failing or engine is None or engine.satisfied or (kind is Kind.B and not engine.training)
            if not over:
                assert engine is not None
                if engine.upcoming() is None:
                    return None
            self._row.popleft()
            if not over:
                return sibling
        return None
