"""The memory that siblings share, as their array asks for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.optim import Optimizer


class SiblingMemory:
    """Where the weights and optimizers of an array's siblings are while others compute: here all on the device.

    The array tells what it does, of siblings by their numbers.
    """

    def open(self, several: bool) -> None:
        """An array begins, which may have several siblings at a time."""

    def close(self) -> None:
        """It has ended."""

    def is_leased(self, index: int) -> bool:
        """Return whether the sibling's state has to stay on the device."""
        return True

    def has_room(self, index: int) -> bool:
        """Return whether the sibling's state fits on the device beside the states that stay there."""
        return True

    def begin_turn(self, index: int) -> None:
        """The sibling runs, and may change its state."""

    def end_turn(self, index: int, module: nn.Module, optimizers: Sequence[Optimizer], device: torch.device) -> None:
        """It has handed in a batch. Its first turn makes its state; optimizers remember more after their first step.

        Raises:
            PlanError: the state does not fit or can't be moved.
        """

    def begin_block(self, index: int, stage: int) -> None:
        """Something is computed for the sibling between its turns."""

    def end_block(self, index: int, keep: bool) -> None:
        """It was computed.

        Args:
            keep: its backward is to come, and finds what it has read where that is.
        """

    def look_ahead(self, coming: Iterable[int]) -> None:
        """Siblings that will probably compute or have turns next, the first one first."""

    def release_sibling(self, index: int) -> None:
        """Move the sibling's tensors back to the host, out of shared memory."""
