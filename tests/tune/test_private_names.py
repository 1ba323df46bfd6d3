"""Tests for every private name of Optuna, Hydra and OmegaConf that the tune layer uses, one for each."""

from __future__ import annotations

import logging
import math

import optuna
import pytest
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from optuna.trial import TrialState

from lightning_pipes.tune import private_hydra
from lightning_pipes.tune.studies import private_optuna


@pytest.fixture
def study() -> optuna.Study:
    return optuna.create_study()


def test_singleton_instances():
    before = HydraConfig.instance()
    instances = private_hydra.hydra_singletons()
    instances[HydraConfig] = other = object()
    assert HydraConfig.instance() is other
    instances[HydraConfig] = before


def test_value_of_a_node():
    config = OmegaConf.create({"a": 3, "b": {"c": 1}})
    assert private_hydra.value_of(config._get_node("a")) == 3
    assert private_hydra.value_of(None) is None


def test_stop_flag_and_thread_local(study):
    with pytest.raises(RuntimeError):
        study.stop()
    with private_optuna.inside_optimize_loop(study):
        study.stop()
    assert private_optuna.is_stop_requested(study)
    private_optuna.reset_stop(study)
    assert not private_optuna.is_stop_requested(study)
    with pytest.raises(RuntimeError):
        study.stop()


def test_storage_and_study_id(study):
    assert isinstance(private_optuna.storage_of(study), optuna.storages.InMemoryStorage)
    other = optuna.create_study(storage=optuna.storages.InMemoryStorage())
    other.optimize(lambda trial: 1.0, n_trials=3)
    private_optuna.share_storage(study, other)
    assert len(study.trials) == 3


def test_study_attributes(study):
    assert private_optuna.read_study_attributes(study) == {}
    private_optuna.write_study_attribute(study, "name", [1])
    assert private_optuna.read_study_attributes(study) == {"name": [1]}


def test_database_url(study):
    assert private_optuna.database_url(private_optuna.storage_of(study)) is None
    made = optuna.create_study(storage="sqlite://")
    assert private_optuna.database_url(private_optuna.storage_of(made)) == "sqlite://"


def test_trial_id(study):
    study.ask()
    trial = study.ask()
    assert private_optuna.stored_trial(study, trial).number == 1
    assert study._storage.get_trial(private_optuna.id_of(trial)).number == 1


def test_progress_bar(study, capsys):
    study.tell(study.ask(), 2.5)
    bar = private_optuna.ProgressBar(True, n_trials=3, timeout=None)
    bar.update(1.0, study)
    bar.close()
    assert "Best trial: 0. Best value: 2.5:  33%" in capsys.readouterr().err


def test_tell_with_warning(study):
    told = private_optuna.tell_with_warning(
        study, study.ask(), math.nan, None, skip_if_finished=True, suppress_warning=True
    )
    assert told == (TrialState.FAIL, None, "The value nan is not acceptable")


def test_log_completed_trial(study, caplog):
    optuna.logging.enable_propagation()
    try:
        with caplog.at_level(logging.INFO, "optuna"):
            study.optimize(lambda trial: trial.suggest_float("x", 1, 1), n_trials=1)
            wanted, before = caplog.records[-1].getMessage(), len(caplog.records)
            private_optuna.log_completed(study, [1.0], study.trials[0])
        assert len(caplog.records) == 2 * before
        assert caplog.records[-1].getMessage() == wanted
    finally:
        optuna.logging.disable_propagation()


@pytest.mark.parametrize(
    ("sampler", "generators"),
    [
        (optuna.samplers.RandomSampler, 1),
        (optuna.samplers.TPESampler, 2),
        (optuna.samplers.NSGAIISampler, 2),
        (optuna.samplers.BruteForceSampler, 1),
    ],
)
def test_random_generators_of_samplers(sampler, generators):
    seeded = sampler(seed=1)
    assert len([*private_optuna.untouched_generators(seeded)]) == generators
    optuna.create_study(sampler=seeded).optimize(lambda trial: trial.suggest_int("x", 0, 99), n_trials=2)
    assert len([*private_optuna.untouched_generators(seeded)]) < generators
    assert [*private_optuna.untouched_generators(sampler())] == []
