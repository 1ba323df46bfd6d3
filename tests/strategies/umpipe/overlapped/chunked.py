"""Costs of unequal chunks for the simulator."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_pipes.ir import Instruction, Kind, Plan
from lightning_pipes.strategies.umpipe.network import Network, Scheme
from tests.free_costs import FreeCosts


@dataclass(frozen=True, eq=False)
class Chunked(FreeCosts):
    """The costs of a scheme, in which the time of a chunk depends only on its process."""

    network: Network
    scheme: Scheme
    overhead_ns: int = 0

    def busy(self, direction: str, process: int) -> int:
        return int(getattr(self.network, direction)[process, getattr(self.scheme, direction)[process]])

    def duration_ns(self, i: Instruction, plan: Plan) -> int:
        if i.kind is Kind.STEP:
            return 0
        last = self.network.stages - 1
        return self.busy("forward", 2 * i.stage) if i.kind is Kind.F else self.busy("backward", 2 * (last - i.stage))

    def transfer_ns(self, i: Instruction, plan: Plan) -> tuple[int, int]:
        if i.kind is Kind.SF:
            return self.busy("forward", 2 * i.stage + 1), 0
        return self.busy("backward", 2 * (self.network.stages - 1 - i.stage) + 1), 0
