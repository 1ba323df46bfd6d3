"""Scalars of the pipeline for any logger."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lightning_pipes.ir import check_count
from lightning_pipes.trainer.loop.host import PipelineCallback


class TimelineLogger(PipelineCallback):
    """Log the step time, bubble and slowest stage of the last batch every `every_n_steps` optimizer steps.

    Every logger of the trainer gets `pipeline/step_ms` (from the first instruction of a batch to the last, in
    milliseconds), `pipeline/bubble` (the share of that in which ranks idle, 0 to 1), `pipeline/efficiency` (the busiest
    rank's share), `pipeline/slowest_stage` (the number of the stage that computes longest, or of the busiest rank's
    first stage where ranks hold several) and `pipeline/slowest_ratio` (its time over the median of the others).

    A sibling of a job array logs neither bubble nor efficiency, because ranks compute for other siblings meanwhile.
    With data_parallel the values are those of the first pipeline. With a schedule that does not flush between batches
    they are logged at the end of an epoch.

    Raises:
        PipelineError: every_n_steps is below 1, or the trainer's strategy is no PipelineStrategy.
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        self.every_n_steps = check_count("TimelineLogger: every_n_steps", every_n_steps)
        self._logged = -1

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.pipeline(trainer)
        self._logged = -1

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        step = trainer.global_step
        if step == self._logged or step == 0 or step % self.every_n_steps:
            return
        self._logged = step  # batches that only add to gradients do not count
        if self.pipeline(trainer).flushes:
            self._log(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.pipeline(trainer).flushes:
            self._log(trainer)

    def _log(self, trainer: pl.Trainer) -> None:
        timing = self.pipeline(trainer).last_timing()
        if timing is not None:
            for logger in trainer.loggers:  # silent everywhere but on rank 0
                logger.log_metrics(timing.metrics, trainer.global_step)
