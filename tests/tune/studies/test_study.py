"""Tests that trials that share one pipeline are the same on every rank and in every run, despite failures."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import lightning.pytorch as pl
import optuna
import pytest
from lightning.pytorch.callbacks import Callback
from optuna.artifacts import FileSystemArtifactStore, get_all_artifact_meta, upload_artifact
from optuna.pruners import HyperbandPruner, SuccessiveHalvingPruner
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import MaxTrialsCallback
from optuna.trial import BaseTrial, FrozenTrial, TrialState

from lightning_pipes import JobArray, MemorySwap, OptunaPruning, optimize_array
from lightning_pipes.arrays.siblings.sibling import current_sibling
from lightning_pipes.arrays.siblings.sibling_board import SiblingFailure
from lightning_pipes.engine.watch.identity import Process
from lightning_pipes.ir import PlanError
from lightning_pipes.testing.ranks import run_ranks, watch_ranks
from lightning_pipes.tune.studies.leader_store import LeaderStore
from lightning_pipes.tune.studies.shared_study import (
    OWNER_ATTRIBUTE,
    RETRY_ATTRIBUTE,
    StudyLease,
    enqueue_again,
    fail_dead_trials,
)
from lightning_pipes.tune.studies.study import StudyFailedError, _Follower
from lightning_pipes.tune.studies.trial import StorageLostError, current_trial
from tests.launch.example import ROOT, environment
from tests.tune.sweep import fit, new_study, objective, summary

STATES = ["COMPLETE", "COMPLETE", "COMPLETE", "PRUNED", "COMPLETE", "COMPLETE", "FAIL", "COMPLETE"]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    logging.getLogger("optuna.lightning_pipes").setLevel(logging.ERROR)
    monkeypatch.setattr("os.environ", os.environ.copy())  # a leader store leaves its address there


def study_and_alone(rank: int, size: int, alone: bool) -> tuple[list[Any], list[float] | None, int]:
    """Run a study of eight trials on this rank.

    Returns:
        Its trials, the losses of its finished trials alone, and the number of calls of the callback on this rank.
    """
    logging.getLogger("optuna.lightning_pipes").setLevel(logging.ERROR)
    called: list[int] = []
    study = optimize_array(
        new_study(), objective, 8, size, catch=ValueError, callbacks=[lambda s, t: called.append(t.number)]
    )
    done = study.get_trials(states=(TrialState.COMPLETE,))
    assert all(t.user_attrs["twice"] == 2 * t.value for t in done)
    return summary(study), [fit(**t.params) for t in done] if alone else None, len(called)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_trials_equal_solo_runs_and_the_next_run(ranks: int) -> None:
    """Check that trials with one seed are the same on all ranks and in all runs, with the losses of solo runs."""
    results = [each for alone in (True, False) for each in run_ranks(study_and_alone, ranks, 3, alone, timeout=90)]
    for trials, alone, _ in results:
        assert trials == results[0][0]
        assert [state for _, state, *_ in trials] == STATES
        finished = [values[0] for _, state, _, values, _ in trials if state == "COMPLETE"]
        assert finished == (alone or results[0][1])
    assert [called for *_, called in results] == ([8] + [0] * (ranks - 1)) * 2


TRIALS = 40
COLUMNS = ("number", "value", "datetime_start", "datetime_complete", "duration", "params", "state")


def long_study(rank: int, size: int) -> tuple[list[Any], list[tuple[str, int]], Any]:
    """Run a study, and return its trials, the order in which they began, took batches and ended, and its table."""
    happened: list[tuple[str, int]] = []

    class Batches(Callback):
        def __init__(self, number: int) -> None:
            self.number = number

        def on_train_batch_start(self, *args: Any) -> None:
            happened.append(("batch", self.number))

    def noted(trial: BaseTrial) -> float:
        happened.append(("begins", trial.number))
        try:
            lr = trial.suggest_float("lr", 1e-4, 0.3, log=True)
            return fit(lr, trial.suggest_categorical("batch", [10, 20]), callbacks=[Batches(trial.number)])
        finally:
            happened.append(("ends", trial.number))

    study = optimize_array(new_study(), noted, TRIALS, size)
    return summary(study), happened, study.trials_dataframe(COLUMNS)


def test_a_place_is_not_free_for_longer_than_a_block() -> None:
    """Check a study of many trials with a median pruner.

    After a trial has ended, the next one begins at most one batch of a sibling later. The study contains all data of
    every trial, and a second run has the same trials in the same order.
    """
    ((first, happened, table),) = run_ranks(long_study, 1, 4, timeout=90)
    assert [number for number, *_ in first] == list(range(TRIALS))
    assert {state for _, state, *_ in first} == {"COMPLETE", "PRUNED"}
    for _, state, params, values, reports in first:
        assert params.keys() == {"lr", "batch"}
        assert values == [reports[max(reports)]]
        assert len(reports) == 3 if state == "COMPLETE" else 1 <= len(reports) <= 3
    assert list(table) == ["number", "value", *COLUMNS[2:5], "params_batch", "params_lr", "state"]
    assert len(table) == TRIALS
    assert not table.isna().any(axis=None)
    begun = 0
    for at, (what, _) in enumerate(happened):
        begun += what == "begins"
        if what == "ends" and begun < TRIALS:
            assert "begins" in [then for then, _ in happened[at + 1 : at + 3]]
    ((second, again, _),) = run_ranks(long_study, 1, 4, timeout=90)
    assert (second, again) == (first, happened)


def toy(trial: BaseTrial) -> float:
    """Return the square of a parameter, without a Trainer, so that the study can run in this process."""
    x = trial.suggest_float("x", -1.0, 1.0)
    for step in range(3):
        trial.report(abs(x) + step, step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return x * x


def states(study: optuna.Study) -> list[str]:
    return [t.state.name for t in study.trials]


def test_no_trials_and_bad_counts() -> None:
    assert optimize_array(new_study(), toy, 0, 2).trials == []
    assert optimize_array(new_study(), toy, 5, 2, timeout=0.0).trials == []
    for n_trials, array_size in ((-1, 2), (3, 0)):
        with pytest.raises(PlanError, match="must be"):
            optimize_array(new_study(), toy, n_trials, array_size)


def prune_as_optuna_integration(trial: Any) -> float:
    """Use a trial in the same way as PyTorchLightningPruningCallback on several ranks."""
    trial.report(1.0, step=0)
    if trial.should_prune():
        raise optuna.TrialPruned
    return float(len(trial.study._storage.get_trial_system_attrs(trial._trial_id)))


def test_a_trial_that_is_too_large_fails_alone() -> None:
    """Check a search for the width of a model with memory for all but one of the widths."""
    told: list[str] = []

    def one(trial: BaseTrial) -> float:
        try:
            return fit(lr=0.1, width=[6, 60, 8, 7][trial.number])
        except PlanError as error:
            told.append(str(error))
            raise

    study = optimize_array(new_study(), one, 4, JobArray(2, memory=MemorySwap(80_000)))
    assert states(study) == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]
    assert re.match(r"sibling 1 has a state of \d+ bytes, but device_bytes=80000 has no room for two", *told)


def test_stop_and_maximal_trials() -> None:
    """Check that studies end by `stop`, by MaxTrialsCallback or when a grid is complete.

    A trial refuses the attributes that only a trial of `study.optimize` has.
    """

    def stop(study: optuna.Study, trial: FrozenTrial) -> None:
        if trial.number == 3:
            study.stop()

    assert len(optimize_array(new_study(), toy, None, 2, callbacks=[stop]).trials) == 4
    assert len(optimize_array(new_study(), toy, None, 1, callbacks=[MaxTrialsCallback(4, states=None)]).trials) == 4
    study = new_study()

    def stops_itself(trial: BaseTrial) -> float:
        if trial.number == 2:
            study.stop()
        return 1.0

    assert len(optimize_array(study, stops_itself, 9, 1).trials) == 3
    with pytest.raises(AttributeError, match=r"has no sampler, .*use the study in optimize_array"):
        optimize_array(new_study(), lambda trial: trial.study.sampler, 1, 1)
    with pytest.raises(AttributeError, match=r"has no relative_params, .*public methods of optuna\.Trial"):
        optimize_array(new_study(), lambda trial: trial.relative_params, 1, 1)
    with pytest.raises(AttributeError, match=r"has no _storage, .*give the Trainer OptunaPruning\(monitor\)"):
        optimize_array(new_study(), prune_as_optuna_integration, 1, 1)
    grid = optuna.create_study(sampler=optuna.samplers.GridSampler({"x": [-1.0, 0.0, 1.0]}, seed=0))
    assert sorted(t.params["x"] for t in optimize_array(grid, toy, None, 1).trials) == [-1.0, 0.0, 1.0]


@pytest.mark.parametrize("pruner", [HyperbandPruner(1, 3, 3), SuccessiveHalvingPruner(1, 2)])
def test_pruners(pruner: optuna.pruners.BasePruner) -> None:
    def run() -> list[Any]:
        sampler = optuna.samplers.TPESampler(seed=1)
        study = optuna.create_study(study_name="pruned", sampler=sampler, pruner=pruner)
        return summary(optimize_array(study, toy, 20, 4))

    first = run()
    assert {state for _, state, *_ in first} == {"COMPLETE", "PRUNED"}
    assert run() == first


def test_several_objectives() -> None:
    def two(trial: BaseTrial) -> tuple[float, float]:
        assert current_trial() is trial
        x = trial.suggest_int("x", 0, 9)
        if x == 0:
            trial.report(1.0, 0)
        if x == 1:
            OptunaPruning("loss").setup(None, None, "fit")  # type: ignore[arg-type]
        return x, 9 - x

    study = optuna.create_study(directions=["minimize", "maximize"], sampler=optuna.samplers.RandomSampler(seed=0))
    study.enqueue_trial({"x": 0})
    study.enqueue_trial({"x": 1})
    found = optimize_array(study, two, 6, 3, catch=(NotImplementedError, PlanError))
    assert states(found) == ["FAIL", "FAIL", *["COMPLETE"] * 4]
    assert all(sum(t.values) == 9 for t in found.trials[2:])


def test_values_that_are_none() -> None:
    """Check that trials fail if their values are not numbers."""
    values: Iterator[Any] = iter([None, float("nan"), "word", [1.0, 2.0], 3])
    found = optimize_array(new_study(), lambda trial: next(values), 5, 1)
    assert states(found) == ["FAIL"] * 4 + ["COMPLETE"]


def test_an_error_ends_the_study_when_the_others_have_ended() -> None:
    """Check that an error ends the study after the other trials have ended, and that the study can be continued."""
    study, seen = new_study(), []

    def fails(trial: BaseTrial) -> float:
        seen.append(trial.number)
        if trial.number == 1:
            raise KeyError("missing")
        return 1.0

    with pytest.raises(KeyError, match="missing"):
        optimize_array(study, fails, 5, 2)
    assert states(study) == ["COMPLETE", "FAIL"]
    assert seen == [0, 1]
    assert states(optimize_array(study, fails, 2, 2))[2:] == ["COMPLETE"] * 2


def said(caplog: pytest.LogCaptureFixture, run: Any) -> list[tuple[str, str]]:
    """Return the log messages about a study of five trials, three of which end badly."""

    def ends(trial: BaseTrial) -> Any:
        trial.suggest_int("x", trial.number, trial.number)
        if trial.number == 1:
            raise optuna.TrialPruned("not this one")
        if trial.number == 2:
            raise KeyError("missing")
        return float("nan") if trial.number == 3 else 7.0 - trial.number

    study = new_study()
    optuna.logging.set_verbosity(logging.INFO)
    caplog.clear()
    run(study, ends)
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_trials_are_logged_as_by_optuna(caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder) -> None:
    """Check that the log messages about trials are equal to the messages of Optuna."""
    logging.getLogger("optuna.lightning_pipes").setLevel(logging.NOTSET)
    optunas = said(caplog, lambda study, ends: study.optimize(ends, 5, catch=KeyError))
    ours = said(caplog, lambda study, ends: optimize_array(study, ends, 5, 1, catch=KeyError))
    assert ours == [line for line in optunas if "failed with value" not in line[1]]  # Optuna's second line
    assert not recwarn.list


def storages(folder: Path) -> list[Any]:
    return [f"sqlite:///{folder}/study.db", JournalStorage(JournalFileBackend(f"{folder}/study.log"))]


@pytest.mark.parametrize("kind", [0, 1])
def test_storages_and_resume(kind: int, tmp_path: Path) -> None:
    """Check that a trial left running by a dead process fails, and that its parameters are tried first.

    Trials of processes on other machines or in other containers stay as they are.
    """
    storage = storages(tmp_path)[kind]
    study = new_study(storage=storage, study_name="s")
    optimize_array(study, toy, 3, 2)
    before = Process.current()._replace(started=1)  # the same process number, but another start time
    for owner in (before, before._replace(machine="other"), before._replace(space="of another container")):
        trial = study.ask()
        trial.suggest_float("x", -1.0, 1.0)
        trial.set_user_attr(OWNER_ATTRIBUTE, str(owner))
    again = new_study(storage=storage, study_name="s", load_if_exists=True)
    trials = optimize_array(again, toy, 2, 2).trials
    assert states(again)[3:6] == ["FAIL", "RUNNING", "RUNNING"]
    assert trials[6].params == trials[3].params
    assert trials[6].user_attrs[RETRY_ATTRIBUTE] == 3
    assert len(trials) == 8


@pytest.mark.parametrize("at", ["tell", "enqueue_trial"])
def test_trial_is_neither_lost_nor_repeated_if_a_rank_is_killed_while_it_fails(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = new_study()
    lease = StudyLease(study)
    trial = study.ask()
    x = trial.suggest_float("x", -1.0, 1.0)
    trial.set_user_attr(OWNER_ATTRIBUTE, str(Process.current()._replace(started=1)))
    with monkeypatch.context() as killed:
        killed.setattr(optuna.Study, at, lambda *_, **__: (_ for _ in ()).throw(SystemExit))
        with pytest.raises(SystemExit):
            fail_dead_trials(study, lease)
    assert fail_dead_trials(study, lease) == 1
    assert states(study) == ["FAIL", "WAITING"]
    assert study.trials[1].system_attrs["fixed_params"] == {"x": x}
    assert fail_dead_trials(study, lease) == 0
    assert len(study.trials) == 2


def test_storage_that_vanishes(tmp_path: Path) -> None:
    """Check the error of a study whose storage is destroyed while it runs."""
    path = tmp_path / "study.db"
    study = new_study(storage=f"sqlite:///{path}", study_name="s")

    def loses(trial: BaseTrial) -> float:
        if trial.number == 3:
            (tmp_path / "kept").write_bytes(path.read_bytes())
            path.write_bytes(b"no database" * 1000)
        return toy(trial)

    with pytest.raises(StorageLostError, match=r"is no longer available \(DatabaseError: file is not a database"):
        optimize_array(study, loses, 6, 2, catch=Exception)
    kept = optuna.load_study(study_name="s", storage=f"sqlite:///{tmp_path}/kept")
    assert states(kept)[:2] == ["COMPLETE"] * 2


def told_why(rank: int) -> str:
    """Return the error of this rank after a callback of rank 0 has failed, while the other rank trains."""
    logging.disable(logging.CRITICAL)

    def fails(study: optuna.Study, trial: FrozenTrial) -> None:
        raise KeyError("callback")

    try:
        optimize_array(new_study(), lambda trial: fit(0.01, epochs=1 + 3 * trial.number), 4, 2, callbacks=[fails])
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_other_ranks_get_the_reason_why_rank_0_ends_a_study() -> None:
    zero, one = run_ranks(told_why, 2, timeout=60)
    assert zero == "KeyError: 'callback'"
    assert one == "StudyFailedError: the study has ended on rank 0: KeyError: 'callback'"


class Harm(Callback):
    """A callback that kills its rank, or raises an error on it, in the second epoch."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1 and "killed" in self._kind:
            os.kill(os.getpid(), signal.SIGKILL)
        if trainer.current_epoch == 1 and "fails" in self._kind:
            raise KeyError("harm")


def interrupted(rank: int, harm: str, storage: str) -> tuple[str, list[str]]:
    """Run a study of rank 0 in which rank 0 or 1 fails in trial 3, and return the error of this rank."""
    logging.disable(logging.CRITICAL)

    victim = rank == (0 if "rank 0" in harm else 1)

    def harmful(trial: BaseTrial) -> float:
        if trial.number == 3:
            if victim and "Ctrl-C" in harm:
                signal.raise_signal(signal.SIGINT)
            if "differs" in harm:
                trial.suggest_int(f"n{rank}", 0, 1)
            if victim and "fails early" in harm:
                raise KeyError("harm")
            return fit(0.01, callbacks=[Harm(harm)] if victim else [])
        return objective(trial)

    def make() -> optuna.Study:
        return new_study(storage=storage, study_name="s", load_if_exists=True)

    try:
        optimize_array(make, harmful, 6, 3, catch=ValueError)
    except BaseException as error:
        cause = error.__cause__
        told = f" <- {type(cause).__name__}: {cause}" if isinstance(cause, SiblingFailure) else ""
        return f"{type(error).__name__}: {error}{told}", []
    return "", []


@pytest.mark.parametrize(
    "harm",
    [
        "Ctrl-C on rank 0",
        "rank 1 is killed",
        pytest.param("rank 0 is killed", marks=pytest.mark.slow),
        pytest.param("rank 1 fails", marks=pytest.mark.slow),
        "rank 1 fails early",
        "differs",
    ],
)
def test_harm_leaves_a_study_to_go_on_with(harm: str, tmp_path: Path) -> None:
    """Check that a study can be continued after each kind of failure, and that the error names its cause."""
    storage = f"sqlite:///{tmp_path}/study.db"
    outcomes = watch_ranks(interrupted, 2, harm, storage, timeout=60)
    study = optuna.load_study(study_name="s", storage=storage)
    finished = study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED))
    assert finished
    found = [o.value[0] if o.value else "" for o in outcomes]
    if harm.startswith("Ctrl-C"):
        assert found[0].startswith("KeyboardInterrupt")
        assert "KeyboardInterrupt" in found[1]
    elif "killed" in harm:
        assert "PeerFailure" in found["rank 0" in harm]
    elif harm == "differs":
        assert "rank 0 calls 'suggest_int n0', rank 1 'suggest_int n1'" in found[0]
    else:
        assert found[0] == "KeyError: 'harm' <- SiblingFailure: sibling 3 failed on rank 1: KeyError: 'harm'"
        assert found[1].startswith("StudyFailedError")
    lost = [t for t in study.trials if t.state == TrialState.FAIL]
    again = [t for t in study.trials if t.state == TrialState.WAITING]
    if harm == "rank 1 is killed":
        assert {t.user_attrs[RETRY_ATTRIBUTE] for t in again} == {t.number for t in lost}
        assert again
    else:
        assert not again
    left = [t.number for t in study.trials if t.state == TrialState.RUNNING]
    assert bool(left) == (harm == "rank 0 is killed")
    resumed = optimize_array(study, toy_of_sweep, 3, 2)
    assert [t.number for t in resumed.trials if t.state == TrialState.RUNNING] == []
    assert len(resumed.get_trials(states=(TrialState.COMPLETE,))) >= len(finished)


def caught(rank: int) -> list[str]:
    """Return the states of trials of which one raises on both ranks, and another one only on rank 1."""
    logging.disable(logging.CRITICAL)

    def one(trial: BaseTrial) -> float:
        if trial.number == 1 or (trial.number == 2 and rank == 1):
            raise ValueError("harm")
        return fit(0.01, epochs=1)

    return states(optimize_array(new_study(), one, 4, 2, catch=(ValueError,)))


def test_error_of_another_rank_is_caught() -> None:
    """Check that `catch` covers errors that only another rank raises."""
    assert run_ranks(caught, 2) == [["COMPLETE", "FAIL", "FAIL", "COMPLETE"]] * 2


def apart(rank: int, flag: str) -> str:
    """Return the error of a study in which trial 0 fails only on rank 1, before any rank trains."""

    def one(trial: BaseTrial) -> float:
        if rank:
            Path(flag).touch()
            raise KeyError("no such file")
        while not Path(flag).exists():
            time.sleep(0.01)
        time.sleep(1.0)
        return 1.0

    _Follower.stop_timeout = 0.1
    try:
        optimize_array(new_study(), one, 1, 1)
    except KeyError as error:
        return str(error)
    return ""


def test_a_rank_that_fails_alone_before_there_are_connections(tmp_path: Path) -> None:
    """Check that the error of a rank is not lost if it fails before ranks are connected."""
    assert run_ranks(apart, 2, str(tmp_path / "flag")) == ["", "'no such file'"]


class Reader:
    """An objective that reads and changes the study by its trial, and uploads an artifact on rank 0.

    Attributes:
        read: what the trials have read on this rank.
    """

    def __init__(self, rank: int, folder: Path) -> None:
        self.read: list[Any] = []
        self._rank = rank
        self._folder = folder
        self._folder.mkdir(exist_ok=True)

    def __call__(self, trial: optuna.Trial) -> float:
        study = trial.study
        names = "study_name", "direction", "directions", "user_attrs", "metric_names", "best_value", "best_params"
        self.read += [trial.number, *(self._call(getattr, study, name) for name in names)]
        self.read += [[t.number for t in self._call(getattr, study, name)] for name in ("trials", "best_trials")]
        self.read.append([t.params for t in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))])
        study.set_user_attr(f"began_{trial.number}", True)
        if trial.number == 1:
            study.enqueue_trial({"x": 0.25})
            self.read.append((study.best_trial.number, study.best_trial.params, isinstance(trial, optuna.Trial)))
        if trial.number == 3:
            study.stop()
        file = self._folder / "notes.txt"
        file.write_text(f"trial {trial.number}")
        store = FileSystemArtifactStore(self._folder)
        if self._rank == 0:
            upload_artifact(artifact_store=store, file_path=str(file), study_or_trial=trial)
        else:
            with pytest.raises(PlanError, match=r"rank 1 has no storage .*if trainer\.is_global_zero"):
                upload_artifact(artifact_store=store, file_path=str(file), study_or_trial=trial)
        return toy(trial)

    @staticmethod
    def _call(function: Any, *args: Any) -> Any:
        try:
            return function(*args)
        except ValueError as error:
            return type(error), str(error)


def contents(study: optuna.Study, folder: Path) -> list[Any]:
    """Return the names and the contents of the artifacts of each trial in `folder`."""
    metas = [get_all_artifact_meta(study_or_trial=t, storage=study._storage) for t in study.trials]
    return [[(m.filename, (folder / m.artifact_id).read_text()) for m in of_trial] for of_trial in metas]


def test_trials_read_the_study_as_in_optuna(tmp_path: Path) -> None:
    """Check `trial.study` and artifacts against the same objective in a study of Optuna."""

    def run(name: str, optimize: Any) -> tuple[Any, ...]:
        reader, study = Reader(0, tmp_path / name), new_study(study_name="read")
        study.set_user_attr("data", [1, 2])
        optimize(study, reader)
        return reader.read, summary(study), study.user_attrs, contents(study, tmp_path / name)

    plain = run("plain", lambda study, reader: study.optimize(reader, 9))
    assert len(plain[1]) == 4
    assert plain[3] == [[("notes.txt", f"trial {n}")] for n in range(4)]
    assert run("array", lambda study, reader: optimize_array(study, reader, 9, 1)) == plain


def dashboard(storage: Any, folder: Path) -> dict[str, Any]:
    """Return what optuna-dashboard serves about the only study in the storage, without times and identifiers."""
    wsgi = pytest.importorskip("optuna_dashboard").wsgi(storage, artifact_store=FileSystemArtifactStore(folder))

    def get(path: str) -> bytes:
        answers: list[str] = []
        environ: dict[str, Any] = {"PATH_INFO": path}
        setup_testing_defaults(environ)
        content = b"".join(wsgi(environ, lambda status, *_: answers.append(status)))
        assert answers == ["200 OK"], content
        return content

    served: dict[str, Any] = json.loads(get("/api/studies/1"))
    for trial in served["trials"]:
        for artifact in trial["artifacts"]:
            artifact["content"] = get(f"/artifacts/1/{trial['trial_id']}/{artifact.pop('artifact_id')}").decode()
        trial["user_attrs"] = [attr for attr in trial["user_attrs"] if attr["key"] != OWNER_ATTRIBUTE]
        del trial["datetime_start"], trial["datetime_complete"]
    served["best_trials"] = [trial["number"] for trial in served["best_trials"]]
    del served["union_user_attrs"]  # with OWNER_ATTRIBUTE
    return served


def test_dashboard_shows_the_study_as_any_other(tmp_path: Path) -> None:
    """Check the trials, the intermediate values and the artifacts that optuna-dashboard serves."""

    def run(name: str, optimize: Any) -> dict[str, Any]:
        folder = tmp_path / name
        reader = Reader(0, folder)
        storage = optuna.storages.RDBStorage(f"sqlite:///{folder}/study.db")
        optimize(new_study(storage=storage, study_name="s"), reader)
        return dashboard(storage, folder)

    plain = run("plain", lambda study, reader: study.optimize(reader, 9))
    assert [len(trial["artifacts"]) for trial in plain["trials"]] == [1] * 4
    assert run("array", lambda study, reader: optimize_array(study, reader, 9, 1)) == plain


def bars(run: Any) -> list[str]:
    """Return the last state of each progress bar, without elapsed seconds, and all log messages."""
    optuna.logging.set_verbosity(logging.INFO)
    logging.getLogger("optuna.lightning_pipes").setLevel(logging.NOTSET)
    with redirect_stderr(StringIO()) as stream:
        run(optuna.create_study(study_name="bars", sampler=optuna.samplers.RandomSampler(seed=0)))
    text = re.sub(r"[\d:]+<[\d:?]+, +[\d.?]+(it/s|s/it)|\d+\.\d+/\d+\.\d+ seconds|\d\d:\d\d/", "", stream.getvalue())
    return [line.split("\r")[-1].rstrip() for line in text.split("\n")]


@pytest.mark.parametrize("limits", [(5, None), (5, 1000.0), (None, 1000.0)])
def test_progress_bar_of_optuna(limits: tuple[int | None, float | None]) -> None:
    def stop(study: optuna.Study, trial: FrozenTrial) -> None:
        if trial.number == 4:
            study.stop()

    n_trials, timeout = limits
    plain = bars(lambda s: s.optimize(toy, n_trials, timeout, callbacks=[stop], show_progress_bar=True))
    assert re.match(r"Best trial: \d\. Best value: \S+ +\d+%\|", plain[-2])
    assert bars(lambda s: optimize_array(s, toy, n_trials, 1, timeout, (), [stop], show_progress_bar=True)) == plain


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("CmaEsSampler", "cmaes", "cmaes"),
        ("GPSampler", "scipy", "scipy"),
        ("QMCSampler", "scipy", "scipy"),
        ("BoTorchSampler", "optuna_integration", r"optuna-integration\[botorch\]"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_samplers_of_other_packages(name: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that samplers suggest the values of Optuna, and that an error names a package that is not installed."""

    def two(trial: BaseTrial) -> float:
        return trial.suggest_float("x", -1.0, 1.0) ** 2 + trial.suggest_float("y", -1.0, 1.0)

    def study() -> optuna.Study:
        few = {} if name == "QMCSampler" else {"n_startup_trials": 2}
        of = optuna.integration if module == "optuna_integration" else optuna.samplers
        return optuna.create_study(sampler=getattr(of, name)(seed=0, **few))

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, module, None)
        patch.delitem(sys.modules, "optuna_integration.botorch", raising=False)
        with pytest.raises((PlanError, ImportError), match=f"pip install {package}"):
            optimize_array(study, two, 4, 2)
    pytest.importorskip(module)
    plain = study()
    plain.optimize(two, 5)
    assert [t.params for t in optimize_array(study, two, 5, 1).trials] == [t.params for t in plain.trials]


def toy_of_sweep(trial: BaseTrial) -> float:
    return trial.suggest_float("lr", 1e-4, 1.0, log=True)


def following(rank: int, folder: str) -> tuple[str, list[Any], list[Any], str]:
    """Run a study for which each rank has its own storage, and then another one whose trials read it.

    Only the storage of rank 0 may be used.
    """
    logging.disable(logging.CRITICAL)
    study = optimize_array(new_study(storage=f"sqlite:///{folder}/study{rank}", study_name="s"), objective, 3, 2)
    assert current_sibling() is None
    reader = Reader(rank, Path(folder) / f"artifacts{rank}")
    with redirect_stderr(StringIO()) as stream:
        second = optimize_array(new_study(), reader, 9, 2, show_progress_bar=True)
    return states(study)[0] if study.trials else "none", summary(second), reader.read, stream.getvalue()


def test_others_write_to_no_storage(tmp_path: Path) -> None:
    """Check that all ranks read the study of rank 0, but only rank 0 writes, and only rank 0 shows a progress bar."""
    zero, one = run_ranks(following, 2, str(tmp_path), timeout=60)
    assert (zero[0], one[0]) == ("COMPLETE", "none")
    assert zero[1:3] == one[1:3]
    assert [state for _, state, *_ in one[1]].count("COMPLETE") >= 3
    assert ("/9 [" in zero[3], one[3]) == (True, "")
    assert [len([*(tmp_path / f"artifacts{rank}").iterdir()]) for rank in (0, 1)] == [len(one[1]) + 1, 1]


def one_of_two_arrays(rank: int, number: int, folder: str) -> tuple[list[int], list[str]]:
    """Return the trials of one of two arrays that share a study.

    The second array begins while the first one runs a trial. This trial ends when the second array has a trial, too.
    """
    logging.disable(logging.CRITICAL)
    began = [Path(folder) / "first", Path(folder) / "second"]
    mine: list[int] = []

    def shared() -> optuna.Study:
        while number == 1 and not began[0].exists():
            time.sleep(0.01)
        return new_study(storage=f"sqlite:///{folder}/study.db", study_name="s", load_if_exists=True)

    def both(trial: BaseTrial) -> float:
        mine.append(trial.number)
        if rank == 0:
            began[number].touch()
            while not all(path.exists() for path in began):
                time.sleep(0.01)
        return objective(trial)

    study = optimize_array(shared, both, 3, 2, catch=ValueError)
    return mine, states(study)


def test_two_arrays_share_a_study(tmp_path: Path) -> None:
    """Check that neither array mistakes the trials of the other one for trials of a dead process."""
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda n: run_ranks(one_of_two_arrays, 2, n, str(tmp_path), timeout=60), range(2)))
    numbers = [[mine for mine, _ in ranks] for ranks in both]
    assert all(ranks[0] == ranks[1] for ranks in numbers)
    assert sorted(numbers[0][0] + numbers[1][0]) == list(range(6))
    study = optuna.load_study(study_name="s", storage=f"sqlite:///{tmp_path}/study.db")
    assert len(study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL))) == 6
    assert not any(RETRY_ATTRIBUTE in trial.user_attrs for trial in study.trials)


def lonely(rank: int) -> str:
    """Return the error of a study in this environment."""
    try:
        optimize_array(new_study(), toy, 3, 2)
    except PlanError as error:
        return str(error)
    return ""


def test_other_launchers_are_refused() -> None:
    for env in ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, {}):
        (said,) = run_ranks(lonely, 1, env={**env, "TORCHELASTIC_USE_AGENT_STORE": "", "WORLD_SIZE": "2"})
        assert "with torchrun, or with srun on SLURM" in said


def script(folder: Path, *launcher: str) -> list[str]:
    """Return the text that each process of the script in sweep.py writes about its study."""
    command = [*(launcher or (sys.executable,)), "-m", "tests.tune.sweep", str(folder)]
    env = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "WORLD_SIZE")}
    found = subprocess.run(
        command, cwd=ROOT, env={**env, **environment("study")}, capture_output=True, text=True, timeout=600
    )
    assert found.returncode == 0, found.stderr
    return [path.read_text() for path in folder.glob("*.said")]


TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node=2"]


def six(rank: int) -> str:
    """Return a summary of six trials."""
    return str(summary(optimize_array(new_study(), objective, 6, 3, catch=ValueError)))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[], TORCHRUN])
def test_every_launcher_gives_the_same_trials(launcher: list[str], tmp_path: Path) -> None:
    """Check that trials do not depend on the launcher.

    Lightning starts the second process in the middle of the first trial, and torchrun starts it before.
    """
    said, expected = script(tmp_path, *launcher), run_ranks(six, 2)
    assert len(said) == 2
    for one in said:
        assert one == expected[0]
    study = optuna.load_study(study_name="script", storage=f"sqlite:///{tmp_path}/study.db")
    assert len(study.trials) == 6


def test_a_store_of_one_process() -> None:
    store = LeaderStore()
    store.put("key", [1])
    assert (store.is_leader, store.get("key"), store.get("other", until=lambda: True)) == (True, [1], None)
    assert issubclass(StudyFailedError, Exception)


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
