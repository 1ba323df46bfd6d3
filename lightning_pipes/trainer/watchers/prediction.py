"""The decision on a run is corrected where its first steps contradict it."""

from __future__ import annotations

from lightning_pipes.trainer.loop.adopting import adopt_cut
from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.loop.step_data import TrainingStep
from lightning_pipes.trainer.loop.watcher import Watcher
from lightning_pipes.trainer.plan.prediction import Prediction


class PredictionCheck(Watcher):
    """Compares first steps with their prediction. It reads the windows of `RunStatistics`, and runs after it."""

    def __init__(self, run: PipelineRun, prediction: Prediction) -> None:
        self._run, self._prediction = run, prediction

    def after_batch(self, step: TrainingStep) -> None:
        """Adopt the decision that the steps call for, from the next batch on."""
        run = self._run
        found = self._prediction.corrected(run.windows)
        if found is not None:
            run.decision = found
            run.took.clear()
            adopt_cut(run, found.layers, found.rows)
