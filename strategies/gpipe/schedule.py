"""The schedule "gpipe": all forwards, then all backwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_pipes.ir import STEP, B, F, Instruction, Kind, Plan, Program, Schedule, check_one_batch


@dataclass(frozen=True)
class GPipe(Schedule):
    """All forwards of a batch, then all backwards in the same order (Huang et al. 2019, arXiv:1811.06965).

    A stage holds all micro-batches of the batch. A step of m micro-batches on p equal stages takes (m + p - 1)(f + b).
    If a rank has several stages, the forwards of the earlier stage come first.

    Raises:
        PlanError: the plan has several jobs, several batches or a split backward.
    """

    name: ClassVar[str] = "gpipe"

    def program(self, plan: Plan) -> Program:
        check_one_batch(plan, self.name)
        return Program(tuple(self._order(plan, stages) for stages in plan.stages))

    # Drawn by `step(GPipe())`:
    # rank 0 |0-1-2-3-............0===1===2===3===| bubble 33.3%
    # rank 1 |..0-1-2-3-......0===1===2===3===....| bubble 33.3%
    # rank 2 |....0-1-2-3-0===1===2===3===........| bubble 33.3%
    #         - forward  = backward  . idle
    def _order(self, plan: Plan, stages: tuple[int, ...]) -> tuple[Instruction, ...]:
        forwards = [F(s, span) for s in stages for span in plan.spans(Kind.F, s)]
        backwards = [B(s, span) for s in reversed(stages) for span in plan.spans(Kind.B, s)]
        return (*forwards, *backwards, *(STEP(s) for s in stages))
