"""Rounds of a job array: a batch of every sibling in a given order of blocks, nobody's next one before all are over.

Siblings hand in their batches first, and nothing is computed meanwhile; then each rank computes its row of the order,
which rank 0 has found by the measured times of the stages.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from lightning.pytorch.utilities import rank_zero_info

from lightning_pipes.arrays.siblings.sibling import Sibling
from lightning_pipes.cost import CostModel
from lightning_pipes.ir import Kind, Plan, PlanError, Program
from lightning_pipes.planning.fit import price_stages
from lightning_pipes.trainer.loop.host import PipelineHost

RoundOrder = Callable[[Plan, CostModel], Program]
"""The order of one batch of each job of a plan, by the seconds of its stages."""


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
        self._plans: dict[int, Plan] = {}
        """Those of the last round, by sibling."""
        self._rows: list[list[tuple[int, bool]]] = []
        """The order of the last round, as rank 0 has told it."""
        self._warned = False

    def begin_round(self, siblings: Sequence[S], share: Callable[[Callable[[], str]], str]) -> None:
        """Begin a round after all siblings have handed in their batches; ended and failing ones have none. Collective.

        Args:
            share: returns on all ranks what its argument returns on rank 0.

        Raises:
            PlanError: a batch is cut into micro-batches.
        """
        working = {s.index: (s, s.engine) for s in siblings if s.engine is not None}
        plans = {index: engine.plan for index, (_, engine) in working.items()}
        for plan in plans.values():
            pieces = len(plan.jobs[0].forward[0])
            if pieces > 1:
                raise PlanError(
                    f"an array in rounds runs whole batches, and a sibling cuts its own into {pieces}; set "
                    "microbatches=1, or leave rounds out"
                )
        same, self._plans = plans == self._plans, plans
        told = share(lambda: "" if same else json.dumps(self._find_rows([s for s, _ in working.values()], plans)))
        if told:
            self._rows = json.loads(told)
        if working and self._rows:
            _, engine = next(iter(working.values()))
            row = self._rows[engine.rank]
            self._row.extend((working[i][0], Kind.B if backward else Kind.F) for i, backward in row if i in working)

    def _find_rows(self, siblings: Sequence[S], plans: Mapping[int, Plan]) -> list[list[tuple[int, bool]]]:
        """Return the blocks of each rank in order: the number of a sibling, and whether it goes backward. Where a rank
        has several stages, a sibling runs its own blocks there in the order of its batch."""
        if not siblings:
            return []
        first = plans[siblings[0].index]
        plan = replace(first, jobs=tuple(plans[s.index].jobs[0] for s in siblings))
        program = self._order(plan, self._measured_costs(siblings[0], plan))
        if len(program.head) != len(plan.stages):
            raise PlanError(
                f"the order of a round has {len(program.head)} rows, and the {plan.n_stages} stages of siblings are on "
                f"{len(plan.stages)} ranks; it needs a row for each rank. Give siblings a schedule with one stage a "
                "rank, which round_order is for, or leave rounds out"
            )
        return [
            [(siblings[i.job].index, i.kind is Kind.B) for i in row if i.kind is not Kind.STEP] for row in program.head
        ]

    def _measured_costs(self, sibling: S, plan: Plan) -> CostModel:
        """Return the costs of the stages by the profile of the siblings' layers; equal stages where there is none."""
        assert sibling.trainer is not None, "who has a window has a trainer"
        host: PipelineHost = sibling.trainer.strategy  # type: ignore[assignment]  # a sibling with a window has one
        decision = host.decision
        if decision.profile is not None and decision.deployment is not None:
            return price_stages(decision.profile, plan, decision.deployment)
        if not self._warned:
            self._warned = True
            why = decision.why or "layers are measured where partition='auto'"
            rank_zero_info(f"JobArray: rounds are ordered as for equal stages, whose times are not known: {why}")
        return CostModel.uniform(plan.n_stages, 1e-3, 2e-3, rows=1)

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
