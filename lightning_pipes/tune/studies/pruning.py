"""Pruning of trials by a logged metric."""

from __future__ import annotations

import lightning.pytorch as pl
import optuna

from lightning_pipes.ir import InputError, check_type
from lightning_pipes.tune.studies.trial import current_trial


class OptunaPruning(pl.Callback):
    """Reports a metric to the trial after each validation, or after each epoch where there is no validation.

    When the study's pruner decides so, the trial ends on all ranks. The callback does nothing outside of
    `optimize_array` and Hydra's sweeps. Reports are numbered from 0.

    Args:
        monitor: name of the logged metric.

    Raises:
        InputError: the study has several objectives, for which Optuna can't prune, or there is no such metric.
    """

    def __init__(self, monitor: str = "val_loss") -> None:
        self._monitor = check_type("OptunaPruning: monitor", monitor, str)
        self._reports = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        trial = current_trial()
        if trial is not None and len(trial.directions) > 1:
            raise InputError(
                f"OptunaPruning({self._monitor!r}): Optuna can't prune trials of a study with {len(trial.directions)} "
                "objectives; take the callback out"
            )

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._report(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.enable_validation:
            self._report(trainer)

    def _report(self, trainer: pl.Trainer) -> None:
        trial = current_trial()
        if trial is None:
            return
        if self._monitor not in trainer.callback_metrics:
            logged = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
            raise InputError(f"OptunaPruning({self._monitor!r}): no such metric is logged; there is {logged}")
        trial.report(float(trainer.callback_metrics[self._monitor]), self._reports)
        self._reports += 1
        if trial.should_prune():
            raise optuna.TrialPruned(f"trial {trial.number} is pruned after report {self._reports}")
