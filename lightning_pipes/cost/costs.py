"""The costs that a simulation asks for, whoever knows them."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from lightning_pipes.cost.links.link import Link
from lightning_pipes.ir import Instruction, Plan


class Costs(Protocol):
    """The costs that a simulation asks for, in integer nanoseconds and bytes. `CostModel` answers it for most; give
    your own where cost depends on more than kind, stage and rows, such as on the batch. What an object says is
    remembered: for other costs make another."""

    @property
    def overhead_ns(self) -> int:
        """Nanoseconds that a rank needs before each computation."""

    def duration_ns(self, i: Instruction, plan: Plan) -> int:
        """Nanoseconds of the computation `i`, all of its `ir.passes`; equal kind, stage, job, batch and `ir.alike` mean
        equal cost."""

    def transfer_ns(self, i: Instruction, plan: Plan) -> tuple[int, int]:
        """Nanoseconds that the send `i` occupies its link at the link's bandwidth, and nanoseconds until it is there
        after that."""

    def link_between(self, source: int, target: int) -> Link:
        """The link from rank `source` to rank `target`: what `transfer` does not say of it."""

    def memory_change(self, i: Instruction, plan: Plan) -> tuple[int, int]:
        """Bytes that the computation `i` takes when it starts, and bytes that it gives back when it ends."""

    def resident_bytes(self, rank: int, plan: Plan) -> int:
        """Bytes that `rank` holds throughout."""


@runtime_checkable
class PerInstructionCosts(Protocol):
    """Costs that may say that operations of one size cost different times: each is then asked for by itself."""

    @property
    def per_instruction(self) -> bool:
        """Whether they do."""
