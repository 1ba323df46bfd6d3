"""A system of its own in one folder: batches without end that use different layers, each when its layers are free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lightning_pipes.ir import Instruction, Plan, Policy, RankView


@dataclass(frozen=True)
class Stream(Policy):
    """Backwards and steps first, then the forward of the earliest batch whose layers are as those before it leave them;
    at most `depth` batches at once."""

    depth: int = 6
    name: ClassVar[str] = "stream"
    flushes: ClassVar[bool] = False

    def pick(self, ready: Sequence[Instruction], view: RankView, plan: Plan) -> Instruction:
        return ready[0]
