"""Errors of comparisons that ranks made while the batch ran."""

from __future__ import annotations

from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.loop.step_data import TrainingStep
from lightning_pipes.trainer.loop.watcher import Watcher


class DeferredErrors(Watcher):
    """Raises the error of a comparison that was left for later, before anything steps by the batch."""

    def __init__(self, run: PipelineRun) -> None:
        self._connections = run.connections

    def before_optimizer_step(self, step: TrainingStep) -> None:
        """Wait for the answers of other ranks."""
        self._connections.check()
