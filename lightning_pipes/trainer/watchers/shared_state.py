"""Tensors that layers leave in objects which layers of other stages have too."""

from __future__ import annotations

from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.loop.step_data import Step
from lightning_pipes.trainer.loop.watcher import Around, EvaluationWatcher


class SharedState(EvaluationWatcher):
    """Watches shared objects in the first batch of training and of evaluation, by `HiddenState`."""

    def __init__(self, run: PipelineRun) -> None:
        self._hidden = run.hidden

    def around_batch(self, step: Step) -> Around:
        """Run the batch with its shared objects watched, where they are."""
        return self._hidden.batch(step.training) if self._hidden.is_due(step.training) else None
