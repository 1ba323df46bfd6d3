"""The interface of costs that the simulator reads."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from lightning_pipes.cost.links.link import Link
from lightning_pipes.ir import Instruction, Plan


class Costs(Protocol):
    """Costs that a simulation reads, in integer nanoseconds and bytes. `CostModel` is enough for most. Implement your
    own where costs depend on more than kind, stage and rows, such as on the batch. The simulator caches the answers of
    an object, so create another object for other costs."""

    @property
    def overhead_ns(self) -> int:
        """Nanoseconds that a rank spends before each computation."""

    def duration_ns(self, i: Instruction, plan: Plan) -> int:
        """Return the nanoseconds of the computation `i`, all of its `ir.layer_passes`. Equal kind, stage, job, batch
        and `ir.cost_key` mean equal cost."""

    def transfer_ns(self, i: Instruction, plan: Plan) -> tuple[int, int]:
        """Return the nanoseconds that the send `i` occupies its link at the link's bandwidth, and the nanoseconds from
        then to its arrival."""

    def link_between(self, source: int, target: int) -> Link:
        """Return the link from rank `source` to rank `target`, for all that `transfer_ns` does not cover."""

    def memory_change(self, i: Instruction, plan: Plan) -> tuple[int, int]:
        """Return the bytes that the computation `i` allocates at its start, and the bytes that it frees at its end."""

    def resident_bytes(self, rank: int, plan: Plan) -> int:
        """Return the bytes that `rank` holds throughout."""


@runtime_checkable
class PerInstructionCosts(Protocol):
    """Costs that may differ between operations of one size; the simulator then asks for each operation."""

    @property
    def per_instruction(self) -> bool:
        """Whether operations of one size may differ in cost."""
