"""Processes started by SLURM: they connect by its variables, and a requeued job continues from its checkpoint."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_pipes.testing.ranks import run_ranks
from tests.faults.training import EPOCHS, STEP, STEPS, Run, losses, train
from tests.launch.slurm import path_with_scontrol

JOB = "4711"


def as_task(rank: int, run: Run) -> tuple[dict[str, Any], str]:
    """Train as one of two tasks of a node. Also return whether Lightning detects the environment of SLURM."""
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC") or name.endswith(("RANK", "_SIZE"))]:
        del os.environ[name]
    os.environ.update(
        SLURM_JOB_ID=JOB,
        SLURM_JOB_NAME="train",
        SLURM_NTASKS="2",
        SLURM_NTASKS_PER_NODE="2",
        SLURM_NNODES="1",
        SLURM_NODELIST="localhost",
        SLURM_PROCID=str(rank),
        SLURM_LOCALID=str(rank),
        SLURM_NODEID="0",
    )
    del os.environ["MASTER_ADDR"]  # derived from the list of nodes
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    return train(rank, run), str(SLURMEnvironment.detect())


def job(folder: Path, path: str, harm: str = "", place: str = "", victims: tuple[int, ...] = ()) -> Path:
    """Run one attempt of a job, and return the directory of its losses.

    The checkpoints of all attempts are saved in `folder`.
    """
    directory = folder / f"attempt{len([*folder.glob('attempt*')])}"
    directory.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    run = Run(str(directory), harm, place, victims, trainer={"devices": 2, "default_root_dir": str(folder)})
    env = {"PATH": path, "CALLS": str(folder / "calls"), "MASTER_PORT": port}
    found = run_ranks(as_task, 2, run, timeout=60, env=env)
    assert [(value["steps"], slurm) for value, slurm in found] == [(EPOCHS * STEPS, "True")] * 2
    return directory


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return path_with_scontrol(tmp_path_factory.mktemp("bin"))


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory, path: str) -> dict[int, set[str]]:
    return losses(job(tmp_path_factory.mktemp("undisturbed"), path))


@pytest.mark.parametrize("victims", [(0, 1), (1,)])
def test_requeued_job_continues(victims, tmp_path, path, wanted):
    """A job that is requeued at the end of an epoch continues with the same losses from its checkpoint."""
    first = job(tmp_path, path, "requeue", "epoch end", victims)
    assert (tmp_path / "calls").read_text() == f"requeue {JOB}\n"  # once, by rank 0
    (checkpoint,) = tmp_path.glob("hpc_ckpt_*.ckpt")
    assert torch.load(checkpoint, weights_only=False)["global_step"] == 2 * STEPS
    again = job(tmp_path, path)
    assert losses(first) == wanted  # saving does not change the training
    assert losses(again) == {step: wanted[step] for step in range(2 * STEPS, EPOCHS * STEPS)}


def test_a_requeue_is_agreed_on_in_the_middle_of_an_epoch(tmp_path, path, wanted):
    """The job is requeued after the step with the signal, although only one rank received it."""
    first = job(tmp_path, path, "requeue", "forward", (1,))
    assert (tmp_path / "calls").read_text() == f"requeue {JOB}\n"
    (checkpoint,) = tmp_path.glob("hpc_ckpt_*.ckpt")
    assert torch.load(checkpoint, weights_only=False)["global_step"] == STEP + 1  # the step with the signal is finished
    assert losses(first) == wanted
    assert losses(job(tmp_path, path)) == {step: wanted[step] for step in range(STEP + 1, EPOCHS * STEPS)}
