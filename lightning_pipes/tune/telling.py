"""How a trial has ended: told the study, and the user as Optuna's `study.optimize` says it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import optuna
from optuna import Study
from optuna.trial import FrozenTrial, Trial, TrialState

log = optuna.logging.get_logger("optuna.lightning_pipes")
"""Below Optuna's own logger, so that `optuna.logging.set_verbosity` is about it, too."""


def tell(study: Study, trial: Trial, value: Any, error: BaseException | None, traceback: bool = True) -> FrozenTrial:
    """Ends a trial by what its objective returned or raised; what is no number makes it fail."""
    pruned = isinstance(error, optuna.TrialPruned)
    state = None if error is None else TrialState.PRUNED if pruned else TrialState.FAIL
    with warnings.catch_warnings():  # of a value that is no number: said below, with the trial's
        warnings.filterwarnings("ignore", module=r"optuna\.study\._tell")
        frozen = study.tell(trial, value if error is None else None, state, skip_if_finished=True)
    if frozen.state == TrialState.COMPLETE:
        study._log_completed_trial(frozen.values, trial.number, frozen.params)
    elif frozen.state == TrialState.PRUNED:
        log.info("Trial %d pruned. %s", trial.number, error or "")
    elif error is None:
        log.warning(
            "Trial %d failed with parameters: %s because its objective returned %r; needed: %s",
            *(trial.number, frozen.params, value, needed(study)),
        )
    else:
        log.warning(
            "Trial %d failed with parameters: %s because of the following error: %r.",
            *(trial.number, frozen.params, error),
            exc_info=error if traceback else None,
        )
    return frozen


def needed(study: Study) -> str:
    """What an objective has to return, in words."""
    count = len(study.directions)
    return "a number that is not NaN" if count == 1 else f"{count} numbers, none of them NaN"


@contextmanager
def in_root_log() -> Iterator[None]:
    """In the block, Optuna's messages go where all others go, once and in their form."""
    logger = logging.getLogger("optuna")
    before = logger.propagate, logger.handlers[:]
    logger.propagate, logger.handlers[:] = True, []
    try:
        yield
    finally:
        logger.propagate, logger.handlers[:] = before
