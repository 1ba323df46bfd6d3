"""Hooks that run while batches overlap do not change what these use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_pipes.trainer.loop.asynchronous import AsynchronousTraining
from lightning_pipes.trainer.loop.step_data import TrainingStep
from lightning_pipes.trainer.loop.watcher import Around, Watcher


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
