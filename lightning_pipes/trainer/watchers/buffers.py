"""Broadcast of buffers, such as running averages, from the first replica."""

from __future__ import annotations

from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.loop.step_data import Step
from lightning_pipes.trainer.loop.watcher import EvaluationWatcher


class BufferBroadcast(EvaluationWatcher):
    """Broadcasts the buffers that training changes, before each training batch and before an evaluation."""

    def __init__(self, run: PipelineRun) -> None:
        self._part = run.part

    def around_batch(self, step: Step) -> None:
        """Give the replicas the buffers of the first one."""
        if step.training or step.first:
            self._part.buffers.before_batch()
