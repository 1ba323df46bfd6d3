"""Tests that a study with a seeded sampler repeats its trials if it starts again, but not if it continues."""

from __future__ import annotations

from collections.abc import Sequence

import optuna
import pytest
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import InMemoryStorage

from lightning_pipes import optimize_array


def toy(trial: optuna.Trial) -> float:
    return trial.suggest_float("x", -1.0, 1.0) ** 2


def tried(storage: InMemoryStorage, sampler: BaseSampler, trials: Sequence[int]) -> list[float]:
    """Return the parameters of all trials of a study, after one call of `optimize_array` per number of trials."""
    study = optuna.create_study(storage=storage, study_name="s", sampler=sampler, load_if_exists=True)
    for n in trials:
        optimize_array(study, toy, n, 1)
    return [trial.params["x"] for trial in study.trials]


@pytest.mark.parametrize("kind", [RandomSampler, TPESampler])
def test_continued_study_tries_other_parameters(kind):
    """Check that a continued study has new trials, which are the same each time."""
    a, b = InMemoryStorage(), InMemoryStorage()
    first = tried(a, kind(seed=1), [4])
    plain = optuna.create_study(sampler=kind(seed=1))
    plain.optimize(toy, 4)
    assert first == [trial.params["x"] for trial in plain.trials]

    both = tried(a, kind(seed=1), [4])
    assert both[:4] == first
    assert len(set(both)) == 8

    tried(b, kind(seed=1), [4])
    assert tried(b, kind(seed=1), [4]) == both  # the same each time
    assert tried(InMemoryStorage(), kind(seed=1), [4, 4])[:4] == first


def test_restored_sampler_is_not_reseeded():
    """Check that a sampler object that is used again continues with its own random numbers."""
    plain = optuna.create_study(sampler=TPESampler(seed=1))
    plain.optimize(toy, 6)
    assert tried(InMemoryStorage(), TPESampler(seed=1), [3, 3]) == [t.params["x"] for t in plain.trials]


def test_enqueued_trials_do_not_count():
    """Check that enqueued trials do not change the random numbers of later ones."""
    found = []
    for run in (optimize_array, lambda study, objective, n, _: study.optimize(objective, n)):
        study = optuna.create_study(sampler=RandomSampler(seed=1))
        study.enqueue_trial({"x": 0.5})
        run(study, toy, 3, 1)
        found.append([t.params["x"] for t in study.trials])
    assert found[0] == found[1]
