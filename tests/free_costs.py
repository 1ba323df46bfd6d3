"""Costs for the simulator in which links have no limits of their own and nothing takes memory."""

from __future__ import annotations

from lightning_pipes.cost import FREE, Link
from lightning_pipes.ir import Instruction, Plan


class FreeCosts:
    """The part of `cost.Costs` that costs in seconds alone have in common."""

    def link_between(self, source: int, target: int) -> Link:
        return FREE

    def memory_change(self, i: Instruction, plan: Plan) -> tuple[int, int]:
        return 0, 0

    def resident_bytes(self, rank: int, plan: Plan) -> int:
        return 0
