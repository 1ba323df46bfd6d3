"""One forward, one backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_pipes.ir import Plan, Program, Schedule
from lightning_pipes.strategies.kfkb import KFKB


@dataclass(frozen=True)
class OneFOneB(Schedule):
    """One forward and one backward in turn, after a warm-up of one micro-batch per later stage (PipeDream-Flush,
    Narayanan et al. 2021, arXiv:2006.09503, S2.2).

    On equal stages and free links, a step takes (m + p - 1)(f + b), as with GPipe. However, stage s of p holds at most
    p - s micro-batches instead of m. The schedule is kFkB with k = 1, and `KFKB` implements the order.
    """

    name: ClassVar[str] = "1f1b"

    # Drawn by `step(OneFOneB())`:
    # rank 0 |0-1-2-........0===3-1===..2===..3===| bubble 33.3%
    # rank 1 |..0-1-....0===2-1===3-2===..3===....| bubble 33.3%
    # rank 2 |....0-0===1-1===2-2===3-3===........| bubble 33.3%
    #         - forward  = backward  . idle
    def program(self, plan: Plan) -> Program:
        return KFKB(k=1).program(plan)
