"""A layer that every batch steps keeps batches from overlapping."""

from __future__ import annotations

from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.loop.step_data import TrainingStep
from lightning_pipes.trainer.loop.watcher import Watcher
from lightning_pipes.trainer.step.uses import Overlap


class OverlapWarning(Watcher):
    """Warns of a layer that every batch steps, where batches overlap that use different layers."""

    def __init__(self, run: PipelineRun) -> None:
        self._engine = run.engine
        self._overlap = Overlap()

    def around_batch(self, step: TrainingStep) -> None:
        """Look at the layers that one more batch steps."""
        self._overlap.count_batch(step.use, self._engine.plan)
