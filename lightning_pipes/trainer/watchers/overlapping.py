"""Watchers of batches that overlap."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.loop.asynchronous import AsynchronousTraining
from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.loop.step_data import TrainingStep
from lightning_pipes.trainer.loop.watcher import Around, Watcher
from lightning_pipes.trainer.step.uses import Overlap


class OneStep(Watcher):
    """Refuses batches if the user's code skips, delays or repeats their step."""

    def __init__(self, run: PipelineRun) -> None:
        self._run = run
        self._last_number = -1

    def before_batch(self, step: TrainingStep) -> None:
        """Look whether an optimizer is asked to step by this batch, for the first time.

        Raises:
            PipelineError: it is not.
        """
        run, number, last = self._run, step.number, self._last_number
        self._last_number = number
        if (step.complete and not run.steps_asked) or number == last:
            owner, name = type(run.cut.module).__name__, run.plans.schedule.name
            raise PipelineError(
                f"{owner}.optimizer_step calls the closure of batch {number} {'again' if number == last else ''} "
                f"outside of optimizer.step(closure=...), as if to step later or not at all. With schedule {name!r} "
                "each stage steps as soon as the gradients of a batch are complete there. Call "
                "optimizer.step(closure=optimizer_closure) once for every batch, or use a schedule that flushes "
                "between batches, such as '1f1b'"
            )


class HookChanges(Watcher):
    """Compares parameters that batches under way use before and after the hooks between two batches."""

    def __init__(self, training: AsynchronousTraining) -> None:
        self._training = training

    def before_batch(self, step: TrainingStep) -> None:
        """Look whether a hook has changed one of them since the last batch.

        Raises:
            PipelineError: it has.
        """
        self._training.between.check()

    def around_batch(self, step: TrainingStep) -> Around:
        """Take note of them once the batch has run."""
        return self._noting()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        yield
        self._training.between.begin_hooks(item.use for item in self._training.unstepped.values())


class OverlapWarning(Watcher):
    """Warns of a layer that every batch steps, where batches overlap that use different layers."""

    def __init__(self, run: PipelineRun) -> None:
        self._engine = run.engine
        self._overlap = Overlap()

    def around_batch(self, step: TrainingStep) -> None:
        """Look at the layers that one more batch steps."""
        self._overlap.count_batch(step.use, self._engine.plan)
