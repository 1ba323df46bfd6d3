"""Reports the end of a trial to the study, and logs it with the messages of Optuna's `study.optimize`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import optuna
from optuna import Study
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, Trial, TrialState

from lightning_pipes.ir import InputError, check_type
from lightning_pipes.tune.studies.private_optuna import log_completed, stored_trial, tell_with_warning
from lightning_pipes.tune.studies.trial import current_trial

log = optuna.logging.get_logger("optuna.lightning_pipes")
"""A child of Optuna's logger, so that `optuna.logging.set_verbosity` also applies to it."""


def report_result(
    study: Study, trial: Trial, value: Any, error: BaseException | None, traceback: bool = True
) -> FrozenTrial:
    """Finish a trial with the result or the error of its objective. If the result is not a number, the trial fails.

    Args:
        study: the study of the trial.
        trial: the trial.
        value: the result of the objective.
        error: the error that the objective raised, or None.
        traceback: whether the log message of a failed trial includes the traceback.

    Returns:
        The finished trial, as the storage contains it.
    """
    pruned = isinstance(error, optuna.TrialPruned)
    state = None if error is None else TrialState.PRUNED if pruned else TrialState.FAIL
    returned = value if error is None else None
    tell = partial(tell_with_warning, study, trial, returned, state, skip_if_finished=True, suppress_warning=True)
    try:
        state, values, why = tell()
    except UpdateFinishedTrialError:  # another process has ended the trial since `tell` looked at it
        state, values, why = tell()
    frozen = stored_trial(study, trial)
    if state == TrialState.COMPLETE:
        assert values is not None
        log_completed(study, values, frozen)
    elif state == TrialState.PRUNED:
        log.info("Trial %d pruned. %s", trial.number, error or "")
    else:
        log.warning(
            "Trial %d failed with parameters: %s because of the following error: %s.",
            *(trial.number, frozen.params, repr(error) if error else why or "another process has ended the trial"),
            exc_info=error if traceback else None,
        )
    return frozen


@contextmanager
def optuna_in_root_log() -> Iterator[None]:
    """Send Optuna's messages to the root logger inside the block, once and in the format of the root logger."""
    logger = logging.getLogger("optuna")
    before = logger.propagate, logger.handlers[:]
    logger.propagate, logger.handlers[:] = True, []
    try:
        yield
    finally:
        logger.propagate, logger.handlers[:] = before


class OptunaPruning(pl.Callback):
    """Report a metric to the trial after each validation, or after each epoch if there is no validation.

    If the study's pruner decides to prune the trial, the trial ends on all ranks. Outside of `optimize_array` and Hydra
    sweeps, the callback does nothing. Reports are numbered from 0.

    Args:
        monitor: the name of the logged metric.

    Raises:
        InputError: the study has several objectives, so that Optuna cannot prune its trials, or the metric is not
            logged.
    """

    def __init__(self, monitor: str = "val_loss") -> None:
        self._monitor = check_type("OptunaPruning: monitor", monitor, str)
        self._reports = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        trial = current_trial()
        if trial is not None and len(trial.directions) > 1:
            raise InputError(
                f"OptunaPruning({self._monitor!r}): Optuna can't prune trials of a study with {len(trial.directions)} "
                "objectives; remove the callback"
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
            raise InputError(
                f"OptunaPruning({self._monitor!r}): no such metric is logged; the logged metrics are {logged}"
            )
        trial.report(float(trainer.callback_metrics[self._monitor]), self._reports)
        self._reports += 1
        if trial.should_prune():
            raise optuna.TrialPruned(f"trial {trial.number} is pruned after report {self._reports}")
