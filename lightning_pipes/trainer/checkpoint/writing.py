"""Choice of the checkpoint writer, and of the moment of writing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins import AsyncCheckpointIO

from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.checkpoint.files import AtomicCheckpointIO


class Writing:
    """How the checkpoints of a strategy are written.

    Attributes:
        background: while training goes on.
    """

    def __init__(self, background: bool) -> None:
        self.background = background
        self._io: CheckpointIO | None = None

    @property
    def io(self) -> CheckpointIO:
        """Writes and reads the files of `checkpoint="full"`."""
        if self._io is None:
            self._io = AtomicCheckpointIO()
        elif isinstance(self._io, private.WrappingCheckpointIO):
            self._io.checkpoint_io = AtomicCheckpointIO()  # taken only if it has none
        return self._io

    @io.setter
    def io(self, io: CheckpointIO | None) -> None:
        if type(io) is AsyncCheckpointIO:  # it would remove the previous checkpoint before the next one is written
            self.background = True
            io = io.checkpoint_io
        self._io = io

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Checkpoints in the block are written when saving them returns."""
        before, self.background = self.background, False
        try:
            yield
        finally:
            self.background = before
