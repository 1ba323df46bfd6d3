"""Reports the end of a trial to the study, and to the user in the words of Optuna's `study.optimize`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import optuna
from optuna import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from lightning_pipes.tune.studies.private_optuna import log_completed, stored_trial, tell_with_warning

log = optuna.logging.get_logger("optuna.lightning_pipes")
"""A child of Optuna's own logger, so that `optuna.logging.set_verbosity` applies to it."""


def report_result(
    study: Study, trial: Trial, value: Any, error: BaseException | None, traceback: bool = True
) -> FrozenTrial:
    """Finish a trial with the result or error of its objective; a result that is no number makes it fail."""
    pruned = isinstance(error, optuna.TrialPruned)
    state = None if error is None else TrialState.PRUNED if pruned else TrialState.FAIL
    returned = value if error is None else None
    state, values, why = tell_with_warning(study, trial, returned, state, skip_if_finished=True, suppress_warning=True)
    frozen = stored_trial(study, trial)
    if state == TrialState.COMPLETE:
        assert values is not None
        log_completed(study, values, frozen)
    elif state == TrialState.PRUNED:
        log.info("Trial %d pruned. %s", trial.number, error or "")
    else:
        log.warning(
            "Trial %d failed with parameters: %s because of the following error: %s.",
            *(trial.number, frozen.params, why if error is None else repr(error)),
            exc_info=error if traceback else None,
        )
    return frozen


@contextmanager
def optuna_in_root_log() -> Iterator[None]:
    """Send Optuna's messages to the root logger inside the block, once and in its format."""
    logger = logging.getLogger("optuna")
    before = logger.propagate, logger.handlers[:]
    logger.propagate, logger.handlers[:] = True, []
    try:
        yield
    finally:
        logger.propagate, logger.handlers[:] = before
