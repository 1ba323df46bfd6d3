"""Two arrays of two processes that share a study, one of which is killed while it trains."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import optuna
import pytest
from lightning.pytorch.callbacks import Callback
from optuna.trial import BaseTrial, TrialState

from lightning_pipes import optimize_array
from lightning_pipes.testing.ranks import scale_timeout, watch_ranks
from lightning_pipes.tune.studies.search import open_storage
from lightning_pipes.tune.studies.shared_study import RETRY_ATTRIBUTE
from tests.launch.example import ROOT, environment
from tests.tune import postgres
from tests.tune.studies import torchrun_array
from tests.tune.sweep import fit, new_study

VICTIM, SURVIVOR = 0, 1
TRIALS = 6
"""The number of trials of each array."""


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


class Stuck(Callback):
    """A callback that reports that it has begun a batch, and never ends it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            (self._folder / "stuck").touch()
            wait_for(self._folder / "never")


def one_array(rank: int, number: int, folder: Path, storage: str) -> None:
    """Run one of the two arrays.

    The victim stays in its third trial until it is killed. The survivor stays in its first trial until that has
    happened. Each rank leaves a file for each trial that it computes.
    """
    logging.disable(logging.CRITICAL)
    (folder / f"pid-{number}-{rank}").write_text(str(os.getpid()))
    begun: list[int] = []

    def objective(trial: BaseTrial) -> float:
        begun.append(trial.number)
        (folder / f"trial-{trial.number}-{number}-{rank}").touch()
        lr = trial.suggest_float("lr", 1e-4, 0.3, log=True)
        if number == SURVIVOR:
            wait_for(folder / "killed")
        stuck = number == VICTIM and rank == 1 and len(begun) == 3
        return fit(lr, epochs=2, callbacks=[Stuck(folder)] if stuck else [])

    def make() -> optuna.Study:
        return new_study(storage=open_storage(storage), study_name="s", load_if_exists=True)

    optimize_array(make, objective, TRIALS, 2)


def kill_group(folder: Path, results: Any) -> None:
    """Kill both processes of the victim in its third trial, and let the survivor continue."""
    try:
        while not (folder / "stuck").exists():
            assert not results.done(), [each.error for each in results.result()]
            time.sleep(0.01)
        for rank in range(2):
            os.kill(int((folder / f"pid-{VICTIM}-{rank}").read_text()), signal.SIGKILL)
        results.result()
    finally:
        (folder / "killed").touch()


def check_one_of_two_is_killed(folder: Path, storage: str) -> None:
    """Check that no trial of the killed array is lost, and that no parameters and no trial are computed twice."""
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(watch_ranks, one_array, 2, n, folder, storage, timeout=90) for n in (VICTIM, SURVIVOR)]
        kill_group(folder, both[VICTIM])
        assert [each.error for each in both[SURVIVOR].result()] == ["", ""]
    assert check_trials(folder, storage)[str(SURVIVOR)] == TRIALS


def check_trials(folder: Path, storage: str) -> Counter[str]:
    """Check that no trial of a dead array is lost, and that no parameters and no trial are computed twice.

    Returns:
        The number of trials that each array began.
    """
    trials = optuna.load_study(study_name="s", storage=open_storage(storage)).trials
    assert {trial.state for trial in trials} <= {TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL}
    lost = [trial for trial in trials if trial.state == TrialState.FAIL]
    again = {t.user_attrs[RETRY_ATTRIBUTE]: t for t in trials if RETRY_ATTRIBUTE in t.user_attrs}
    assert 1 <= len(lost) <= 2
    assert {t.number: t.params for t in lost} == {number: t.params for number, t in again.items()}
    finished = [t.params["lr"] for t in trials if t.state != TrialState.FAIL]
    assert len(set(finished)) == len(finished)
    computed = {tuple(path.name.split("-")[1:3]) for path in folder.glob("trial-*")}
    assert len(computed) == len(trials)  # no trial in two arrays
    return Counter(array for _, array in computed)


def test_one_of_two_arrays_is_killed(tmp_path: Path) -> None:
    check_one_of_two_is_killed(tmp_path, f"{tmp_path}/study.log")


@pytest.mark.slow
@pytest.mark.skipif(bool(postgres.missing_reason()), reason=postgres.missing_reason() or "-")
def test_one_of_two_arrays_is_killed_with_postgresql(tmp_path: Path) -> None:
    with postgres.postgres_server() as url:
        check_one_of_two_is_killed(tmp_path, url)


@pytest.mark.slow
def test_torchrun_restarts_one_of_two_arrays(tmp_path: Path) -> None:
    """Check two arrays with a rendezvous each, one of which torchrun restarts after the death of its rank 0."""
    commands = []
    for array in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            endpoint = f"--rdzv-endpoint=127.0.0.1:{free.getsockname()[1]}"
        launch = ["--nnodes=1", "--nproc-per-node=2", "--rdzv-backend=c10d", endpoint, f"--rdzv-id={array}"]
        script = ["-m", torchrun_array.__name__, str(tmp_path), str(array)]
        commands.append([sys.executable, "-m", "torch.distributed.run", *launch, "--max-restarts=1", *script])
    env = {**os.environ, **environment("two arrays"), "OMP_NUM_THREADS": "1"}
    arrays = [subprocess.Popen(each, env=env, cwd=ROOT, text=True, stdout=-1, stderr=-2) for each in commands]
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda each: each.communicate(timeout=scale_timeout(150))[0], arrays))
    assert [each.returncode for each in arrays] == [0, 0], "\n".join(said)
    assert check_trials(tmp_path, f"{tmp_path}/study.log") == {
        "0.0": 3,
        "0.1": torchrun_array.TRIALS,
        "1.0": torchrun_array.TRIALS,
    }
