"""Test that parameters enqueued for a trial are not lost if the trial fails."""

from __future__ import annotations

import optuna
from optuna.trial import TrialState

from lightning_pipes.tune.studies.study import enqueue_again


def test_a_queued_trial_that_dies_before_it_suggests_is_tried_again():
    study = optuna.create_study()
    study.enqueue_trial({"x": 0.25, "y": 3})
    died = study.ask()
    died.suggest_int("y", 0, 9)
    study.tell(died, state=TrialState.FAIL)
    enqueue_again(study, died.number, died.params)
    again = study.ask()
    assert again.suggest_float("x", 0, 1) == 0.25
    assert again.suggest_int("y", 0, 9) == 3
