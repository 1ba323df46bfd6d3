"""An array of arrays on SLURM: each task of a SLURM job array is one array, and a requeued task continues its trials.

The tests set the variables of SLURM, and replace `scontrol`.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import optuna
import pytest
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from optuna.trial import BaseTrial, TrialState

from lightning_pipes import optimize_array
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.tune.studies.search import open_storage
from lightning_pipes.tune.studies.shared_study import RETRY_ATTRIBUTE
from tests.launch.slurm import path_with_scontrol
from tests.tune.sweep import fit

JOB, TASK = "4711", "3"
TRIALS = 4


class Requeue(Callback):
    """A callback with which the process gets the signal of SLURM in the second epoch."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (1, 2):
            signal.raise_signal(signal.SIGUSR1)


class Steps(Callback):
    """A callback that writes the global step at which the training begins."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            self._path.write_text(str(trainer.global_step))


def one_task(rank: int, folder: Path, victims: Sequence[int], restarts: int) -> str:
    """Run one attempt of a task of the job array as one of its two processes, and return its error.

    In the first attempt, the victims get the signal of SLURM in trial 1.
    """
    logging.disable(logging.CRITICAL)
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC") or name.endswith(("RANK", "_SIZE"))]:
        del os.environ[name]
    os.environ.update(
        SLURM_JOB_ID="4714",
        SLURM_ARRAY_JOB_ID=JOB,
        SLURM_ARRAY_TASK_ID=TASK,
        SLURM_ARRAY_TASK_COUNT="4",
        SLURM_JOB_NAME="sweep",
        SLURM_STEP_ID="0",
        SLURM_NTASKS="2",
        SLURM_NTASKS_PER_NODE="2",
        SLURM_NNODES="1",
        SLURM_NODELIST="localhost",
        SLURM_PROCID=str(rank),
        SLURM_LOCALID=str(rank),
        SLURM_NODEID="0",
    )
    if restarts:
        os.environ["SLURM_RESTART_COUNT"] = str(restarts)
    del os.environ["MASTER_ADDR"]  # derived from the list of nodes

    def objective(trial: BaseTrial) -> float:
        lr = trial.suggest_float("lr", 1e-4, 0.3, log=True)
        repeated = trial.user_attrs.get(RETRY_ATTRIBUTE)
        checkpoint = folder / str(repeated) / "on_exception.ckpt"
        requeue = [Requeue()] if not restarts and trial.number == 1 and rank in victims else []
        return fit(
            lr,
            devices=2,
            callbacks=[
                *requeue,
                Steps(folder / f"begin-{trial.number}"),
                OnExceptionCheckpoint(str(folder / str(trial.number))),
            ],
            checkpoint=str(checkpoint) if checkpoint.exists() else None,
        )

    def make() -> optuna.Study:
        return optuna.create_study(
            storage=open_storage(f"{folder}/study.log"),
            study_name="s",
            load_if_exists=True,
            sampler=optuna.samplers.RandomSampler(seed=1),
        )

    try:
        optimize_array(make, objective, TRIALS, 2)
    except SystemExit as error:  # SIGTERMException is one
        return f"{type(error).__name__} {error.code}"
    return ""


def alone(rank: int, rates: Sequence[float]) -> list[float]:
    """Return the losses of trainings with the given learning rates, without interruptions."""
    return [fit(lr, devices=2) for lr in rates]


@pytest.mark.slow
@pytest.mark.parametrize("victims", [(0, 1), (1,)])
def test_a_requeued_task_continues_its_trials(victims: tuple[int, ...], tmp_path: Path) -> None:
    """Check that all ranks end after the same batch, that rank 0 requeues the task once, and that the next attempt
    first continues the trials of the earlier attempt from their checkpoints, with the results of whole trainings."""

    def attempt(restarts: int) -> list[str]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        env = {"PATH": path_with_scontrol(tmp_path), "CALLS": str(tmp_path / "calls"), "MASTER_PORT": port}
        return run_ranks(one_task, 2, tmp_path, victims, restarts, timeout=90, env=env)

    assert attempt(0) == ["SIGTERMException 143"] * 2
    assert (tmp_path / "calls").read_text() == f"requeue {JOB}_{TASK}\n"
    study = optuna.load_study(study_name="s", storage=open_storage(f"{tmp_path}/study.log"))
    lost = [t.number for t in study.trials if t.state == TrialState.FAIL]
    assert 1 in lost
    assert attempt(1) == ["", ""]
    assert (tmp_path / "calls").read_text() == f"requeue {JOB}_{TASK}\n"
    trials = study.trials
    again = {t.user_attrs[RETRY_ATTRIBUTE]: t for t in trials if RETRY_ATTRIBUTE in t.user_attrs}
    assert list(again) == lost
    assert all(trials[number].params == trial.params for number, trial in again.items())
    assert all(int((tmp_path / f"begin-{trial.number}").read_text()) > 0 for trial in again.values())
    done = [t for t in trials if t.state == TrialState.COMPLETE]
    assert len(done) == len(trials) - len(lost)
    wanted, _ = run_ranks(alone, 2, [t.params["lr"] for t in done], timeout=90)
    assert [t.value for t in done] == wanted
