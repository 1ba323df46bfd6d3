"""Costs for the simulator with unlimited links and without memory use."""

from __future__ import annotations

from lightning_pipes.cost import FREE_LINK, Link
from lightning_pipes.ir import Instruction, Plan


class FreeCosts:
    """Base class for costs that only model seconds: links are free, and nothing takes memory."""

    def link_between(self, source: int, target: int) -> Link:
        return FREE_LINK

    def memory_change(self, i: Instruction, plan: Plan) -> tuple[int, int]:
        return 0, 0

    def resident_bytes(self, rank: int, plan: Plan) -> int:
        return 0
