"""Stale reads: batches that read older versions of layers."""

from __future__ import annotations

from collections import deque
from collections.abc import Set

from lightning_pipes.ir.errors import PlanError
from lightning_pipes.ir.instruction import Instruction
from lightning_pipes.ir.stream.use import Delayed


class StaleReads:
    """Layers that batches read in an older version, each batch in a copy of its own.

    A forward waits for the STEP whose result it reads, and STEPs wait for each other.
    """

    def __init__(self) -> None:
        self._steps: dict[str, deque[Instruction]] = {}  # from the last one on that has been read
        self._read: dict[str, int] = {}  # by the batch before: what this batch has left
        self._ranks: dict[str, int] = {}

    def keys(self) -> Set[str]:
        """Return the names of the layers."""
        return self._steps.keys()

    def enter(
        self, name: str, step: Instruction, delay: Delayed, rank: int
    ) -> tuple[set[Instruction], set[Instruction]]:
        """Return the STEPs that the next batch's forwards wait for, and those for its own `step`.

        Raises:
            PlanError: it would read an older version than the batch before, or a copy on another rank.
        """
        read = step.batch - delay.by
        steps = self._steps.setdefault(name, deque())
        if self._ranks.setdefault(name, rank) != rank:
            raise PlanError(
                f"batch {step.batch} reads layer {name!r} late on rank {rank}, and batches before on rank "
                f"{self._ranks[name]}; keep a layer on one rank"
            )
        if steps and read < steps[0].batch <= self._read[name]:
            raise PlanError(
                f"batch {step.batch} reads layer {name!r} {delay.by} batches late, an older version than the batch "
                "before; a delay may grow by one from batch to batch, not by more"
            )
        while len(steps) > 1 and steps[1].batch <= read:
            steps.popleft()
        self._read[name] = read
        before = {steps[0]} if steps and steps[0].batch <= read else set()
        last = {steps[-1]} if steps else set()
        steps.append(step)
        return before, last
