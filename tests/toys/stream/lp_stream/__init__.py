"""A complete third-party policy in one folder, for a stream of batches that use different layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from lightning_pipes.ir import Instruction, Plan, Policy, RankView


@dataclass(frozen=True)
class Stream(Policy):
    """A policy that picks the first ready instruction: backwards and steps first, then forwards of the earliest batch.

    A forward is ready when all earlier batches have updated its layers. At most `depth` batches are in flight.
    """

    depth: int = 6
    name: ClassVar[str] = "stream"
    flushes: ClassVar[bool] = False

    def pick(self, ready: Sequence[Instruction], view: RankView, plan: Plan) -> Instruction:
        return ready[0]
