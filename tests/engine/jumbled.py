"""A policy that runs the ready instructions in a pseudorandom order."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lightning_pipes.ir import Instruction, Plan, Policy, RankView


@dataclass(frozen=True)
class Jumbled(Policy):
    """Pick a pseudorandom kind, batch and stage, and of these the first instruction that is ready.

    The samples of a batch therefore pass each stage in their order.
    """

    seed: int = 0
    depth: int = 6
    name: ClassVar[str] = "jumbled"
    flushes: ClassVar[bool] = False

    def pick(self, ready: Sequence[Instruction], view: RankView, plan: Plan) -> Instruction:
        first = {(i.kind, i.batch, i.stage): i for i in reversed(ready)}
        return min(first.values(), key=lambda i: zlib.crc32(f"{self.seed} {i}".encode()))
