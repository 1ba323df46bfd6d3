"""Warnings that the first batch calls for."""

from __future__ import annotations

from lightning_pipes.ir import Kind
from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.loop.step_data import TrainingStep
from lightning_pipes.trainer.loop.watcher import Watcher
from lightning_pipes.trainer.module.checks import warn_about_small_batch
from lightning_pipes.trainer.step.parameter_hooks import warn_about_hooks


class FirstBatch(Watcher):
    """Warns of a batch with fewer samples than stages, and of hooks that batches which overlap run in parts."""

    def __init__(self, run: PipelineRun) -> None:
        self._run = run
        self._warns = True

    def around_batch(self, step: TrainingStep) -> None:
        """Look at the first batch; where batches overlap, at the first one that is cut."""
        if not self._warns:
            return
        run, plan = self._run, self._run.engine.plan
        if not run.is_asynchronous:
            self._warns = False
            warn_about_small_batch(step.rows, plan.n_stages)
        elif len(plan.spans(Kind.F, 0)) > 1:
            self._warns = False
            warn_about_hooks(run.part.parameters, run.part.reducer)
