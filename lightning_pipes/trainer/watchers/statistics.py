"""The last batches of a run with their events, for planners, callbacks and the report."""

from __future__ import annotations

from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.loop.step_data import TrainingStep
from lightning_pipes.trainer.loop.watcher import Watcher
from lightning_pipes.trainer.reports.report import KEPT_STEPS
from lightning_pipes.trainer.reports.timing import Share


class RunStatistics(Watcher):
    """Keeps the windows of a run with a flush after every batch."""

    def __init__(self, run: PipelineRun) -> None:
        self._run = run

    def after_batch(self, step: TrainingStep) -> None:
        """Keep the events of the batch, and the time that it took."""
        run, window = self._run, step.window
        if window is None:
            return
        run.windows.append(window)
        if run.plans.every:
            run.statistics.add(window)
        if len(run.took) < KEPT_STEPS:
            run.took.append(Share.of(window.events).took)
