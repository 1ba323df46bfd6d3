"""The user's code leaves the pipelined layers where they are."""

from __future__ import annotations

from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.loop.step_data import TrainingStep
from lightning_pipes.trainer.loop.watcher import Watcher


class LayersInPlace(Watcher):
    """Refuses to train a module in which other layers have taken the place of the pipelined ones."""

    def __init__(self, run: PipelineRun) -> None:
        self._cut = run.cut

    def before_batch(self, step: TrainingStep) -> None:
        """Look for the layers in the module."""
        self._cut.check_in_place()
