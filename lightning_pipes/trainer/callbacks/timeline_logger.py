"""A callback that logs scalars of the pipeline to all loggers."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from lightning_pipes.ir import check_count
from lightning_pipes.trainer.loop.host import PipelineCallback


class TimelineLogger(PipelineCallback):
    """Logs the step time, the bubble and the slowest stage of the last batch every `every_n_steps` optimizer steps.

    Each logger of the trainer receives these metrics:

    - `pipeline/step_ms`: the time from the first instruction of a batch to the last, in milliseconds.
    - `pipeline/bubble`: the share of this time in which ranks idle, from 0 to 1.
    - `pipeline/efficiency`: the share of this time in which the busiest rank computes.
    - `pipeline/slowest_stage`: the number of the stage with the longest computing time. If ranks hold several stages,
      it is the first stage of the busiest rank.
    - `pipeline/slowest_ratio`: the computing time of the busiest rank divided by the median of the other ranks.

    A sibling of a job array logs neither the bubble nor the efficiency, because its ranks also compute for other
    siblings. With `data_parallel`, the values describe the first pipeline. With a schedule that does not flush between
    batches, they are logged at the end of an epoch.

    Args:
        every_n_steps: the number of optimizer steps between two entries.

    Raises:
        PipelineError: `every_n_steps` is below 1, or the strategy of the trainer is not a PipelineStrategy.
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
        self._logged = step  # batches that only accumulate gradients do not count
        if self.pipeline(trainer).flushes:
            self._log(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.pipeline(trainer).flushes:
            self._log(trainer)

    def _log(self, trainer: pl.Trainer) -> None:
        timing = self.pipeline(trainer).last_timing()
        if timing is not None:
            for logger in trainer.loggers:  # loggers ignore the call on ranks other than 0
                logger.log_metrics(timing.metrics, trainer.global_step)
