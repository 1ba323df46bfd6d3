"""Tests of the leases of arrays that share a study, without processes and in virtual time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import BaseTrial, FrozenTrial, TrialState

from lightning_pipes import optimize_array
from lightning_pipes.engine.watch.identity import Process
from lightning_pipes.ir.clock import use_clock
from lightning_pipes.tune.studies.private_optuna import write_study_attribute
from lightning_pipes.tune.studies.shared_study import (
    LEASE_SECONDS,
    OWNER_ATTRIBUTE,
    RETRY_ATTRIBUTE,
    StudyLease,
    ask_trial,
    enqueue_again,
    fail_dead_trials,
)
from tests.tune.sweep import new_study
from tests.virtual_clock import VirtualClock

ELSEWHERE = str(Process.current()._replace(machine="elsewhere"))
"""The owner of an array on another host."""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", os.environ.copy())  # a leader store leaves its address there


@pytest.fixture(params=["journal", "sqlite"])
def study(request: pytest.FixtureRequest, tmp_path: Path) -> optuna.Study:
    if request.param == "sqlite":
        return new_study(storage=f"sqlite:///{tmp_path}/study.db", study_name="s")
    return new_study(storage=JournalStorage(JournalFileBackend(f"{tmp_path}/study.log")), study_name="s")


@pytest.fixture
def clock() -> Iterator[VirtualClock]:
    with use_clock(made := VirtualClock()):
        yield made


def write_lease(study: optuna.Study, renewals: int, slurm: Any = None) -> None:
    """Write the lease of the array on the other host."""
    lease = {"renewals": renewals, "slurm": slurm}
    write_study_attribute(study, f"lightning_pipes:array:{ELSEWHERE}", lease)


def begin_trial(study: optuna.Study, x: float = 0.25) -> int:
    """Begin a trial of the array on the other host."""
    trial = study.ask()
    trial.set_user_attr(OWNER_ATTRIBUTE, ELSEWHERE)
    trial.suggest_float("x", x, x)
    return trial.number


def test_a_lease_ends_when_it_is_not_renewed(study: optuna.Study, clock: VirtualClock) -> None:
    """Check that an array on another host is alive for as long as its counter changes in every 300 seconds."""
    write_lease(study, 1)
    number = begin_trial(study)
    lease = StudyLease(study)
    assert fail_dead_trials(study, lease) == 0
    clock.sleep(LEASE_SECONDS - 1)
    assert fail_dead_trials(study, lease) == 0
    write_lease(study, 2)
    clock.sleep(10 * LEASE_SECONDS)
    assert fail_dead_trials(study, lease) == 0  # renewed in the meantime, at an unknown time
    clock.sleep(LEASE_SECONDS - 1)
    assert fail_dead_trials(study, lease) == 0
    clock.sleep(1)
    assert fail_dead_trials(study, lease) == 1
    assert study.trials[number].state == TrialState.FAIL
    assert study.trials[-1].user_attrs == {RETRY_ATTRIBUTE: number}
    assert study.trials[-1].system_attrs["fixed_params"] == {"x": 0.25}


def test_a_lease_that_was_given_back_has_ended(study: optuna.Study) -> None:
    begin_trial(study)
    with StudyLease(study) as lease:
        assert not lease.has_ended(ELSEWHERE)  # the other array has written no lease
        write_lease(study, 1)
        assert not lease.has_ended(ELSEWHERE)
        assert lease.has_others()
    other = StudyLease(study)
    assert not other.has_ended(str(Process.current()))
    assert fail_dead_trials(study, other) == 0
    write_study_attribute(study, f"lightning_pipes:array:{ELSEWHERE}", None)
    assert not other.has_others()
    assert fail_dead_trials(study, other) == 1


@pytest.mark.parametrize(
    ("job", "restarts", "dead"),
    [("4711_3", "2", 1), ("4711_3", "1", 0), ("4711_4", "2", 0), ("4712_3", "2", 0), (None, "2", 0)],
)
def test_slurm_restarts_a_job_when_its_processes_have_ended(
    job: str | None, restarts: str, dead: int, study: optuna.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a requeued task of a job array repeats the trials of its earlier attempt, on whatever host."""
    write_lease(study, 1, ["4711_3", 1])
    begin_trial(study)
    if job is not None:
        array, task = job.split("_")
        for name, value in (("ARRAY_JOB_ID", array), ("ARRAY_TASK_ID", task), ("PROCID", "0"), ("JOB_ID", "99")):
            monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    with StudyLease(study) as lease:
        assert fail_dead_trials(study, lease) == dead


def test_two_arrays_that_find_the_same_dead_trial_repeat_it_once(study: optuna.Study, clock: VirtualClock) -> None:
    """Check all orders in which two arrays can queue one trial: the parameters run once."""
    write_lease(study, 1)
    number = begin_trial(study)
    first, second = StudyLease(study), StudyLease(study)
    assert not first.has_ended(ELSEWHERE)
    assert not second.has_ended(ELSEWHERE)
    clock.sleep(LEASE_SECONDS)
    assert fail_dead_trials(study, first) == 1
    study.enqueue_trial({"x": 0.25}, user_attrs={RETRY_ATTRIBUTE: number})  # by the second one, at the same time
    repeats = ask_trial(study)
    assert repeats.user_attrs[RETRY_ATTRIBUTE] == number
    assert RETRY_ATTRIBUTE not in ask_trial(study).user_attrs
    assert [t.state.name for t in study.trials if t.user_attrs.get(RETRY_ATTRIBUTE) == number] == ["RUNNING", "FAIL"]


def test_a_trial_that_finishes_while_it_is_queued_again_is_not_repeated(study: optuna.Study) -> None:
    number = begin_trial(study)
    enqueue_again(study, number, {"x": 0.25})
    study.tell(number, 1.0)  # by its array, which was slow, but alive
    assert RETRY_ATTRIBUTE not in ask_trial(study).user_attrs
    assert [t.state.name for t in study.trials if t.params or RETRY_ATTRIBUTE in t.user_attrs] == ["COMPLETE", "FAIL"]


def test_arrays_with_one_seed_draw_different_parameters(study: optuna.Study) -> None:
    """Check that a sampler with a fixed seed draws other numbers if another array has begun, but no trial has."""

    def draw() -> float:
        made = optuna.create_study(
            storage=study._storage, study_name="s", load_if_exists=True, sampler=optuna.samplers.RandomSampler(seed=7)
        )
        optimize_array(made, lambda trial: trial.suggest_float("x", 0, 1), 1, 1)
        return made.trials[-1].params["x"]

    alone = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=7))
    alone.optimize(lambda trial: trial.suggest_float("x", 0, 1), 1)
    assert draw() == alone.trials[0].params["x"]
    optuna.delete_study(study_name="s", storage=study._storage)
    fresh = optuna.create_study(study_name="s", storage=study._storage)
    write_lease(fresh, 1)
    assert draw() != alone.trials[0].params["x"]


@pytest.mark.parametrize("reports", [True, False])
def test_a_trial_that_another_array_has_ended_does_not_end_the_study(reports: bool, study: optuna.Study) -> None:
    """Check that the result of a trial that is repeated elsewhere is not used, and that the other trials run."""
    told: list[int] = []

    def one(trial: BaseTrial) -> float:
        if trial.number == 1:
            study.tell(1, state=TrialState.FAIL)  # by the other array
        if reports:
            trial.report(1.0, 0)
        return 1.0

    def tell(study: optuna.Study, trial: FrozenTrial) -> None:
        told.append(trial.number)

    optimize_array(study, one, 3, 1, callbacks=[tell])
    assert [t.state.name for t in study.trials] == ["COMPLETE", "FAIL", "COMPLETE"]
    assert study.trials[1].values is None
    assert told == [0, 1, 2]


@pytest.mark.parametrize("statement", ["CREATE TABLE studies", "CREATE TABLE alembic_version", "INSERT INTO alembic"])
def test_arrays_that_create_one_database_at_the_same_time(statement: str, tmp_path: Path) -> None:
    """Check an array that finds the database empty just before another array creates it."""
    begun: list[str] = []
    others: list[optuna.Study] = []

    def create() -> optuna.Study:
        return new_study(storage=f"sqlite:///{tmp_path}/study.db", study_name="s", load_if_exists=True)

    def create_first(connection: Any, cursor: Any, text: str, *_: Any) -> None:
        if text.strip().startswith(statement) and not begun:
            begun.append(text)  # because the other array executes the same statement
            others.append(create())

    sqlalchemy.event.listen(sqlalchemy.Engine, "before_cursor_execute", create_first)
    try:
        study = optimize_array(create, lambda trial: trial.suggest_float("x", 0, 1), 1, 1)
    finally:
        sqlalchemy.event.remove(sqlalchemy.Engine, "before_cursor_execute", create_first)
    assert [trial.params for trial in others[0].trials] == [trial.params for trial in study.trials] != []
