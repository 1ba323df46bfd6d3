"""A policy with which the rank of the first stage also has the last stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lightning_pipes.ir import Instruction, Plan, Policy, RankView


@dataclass(frozen=True)
class Eager(Policy):
    """A policy that runs instructions without waiting, and that places the first and the last stage on one rank."""

    name: ClassVar[str] = "eager"

    def place_stages(self, n_ranks: int) -> tuple[int, ...]:
        return (*range(n_ranks), 0)

    def pick(self, ready: Sequence[Instruction], view: RankView, plan: Plan) -> Instruction | None:
        return ready[0]
