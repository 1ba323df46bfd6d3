"""Tests of the warnings about storages that several arrays cannot share."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from lightning_pipes import optimize_array
from lightning_pipes.tune.studies import storage_checks
from lightning_pipes.tune.studies.storage_checks import file_system_of, is_network_file_system
from tests.tune.sweep import new_study

MOUNTS = r"""
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /home rw,relatime shared:2 master:1 - nfs4 server:/home rw,vers=4.2
31 30 0:41 / /home/me/local rw - xfs /dev/sdb rw
32 22 0:42 / /mnt/with\040space rw - fuse.sshfs host: rw
33 22 0:43 / /scratch rw - lustre mds:/scratch rw
34 22 0:44 / /scratch rw - tmpfs tmpfs rw
"""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", os.environ.copy())


@pytest.mark.parametrize(
    ("path", "kind", "network"),
    [
        ("/data/study.db", "ext4", False),
        ("/home/me/study.db", "nfs4", True),
        ("/homes/study.db", "ext4", False),
        ("/home/me/local/study.db", "xfs", False),
        ("/mnt/with space/study.db", "fuse.sshfs", True),
        ("/scratch/study.db", "tmpfs", False),
    ],
)
def test_file_systems(path: str, kind: str, network: bool, tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS.lstrip())
    assert file_system_of(Path(path), mounts) == kind
    assert is_network_file_system(kind) == network
    assert file_system_of(Path(path), tmp_path / "missing") == ""
    assert file_system_of(tmp_path)
    assert is_network_file_system("fuse.glusterfs")


def logged(study: optuna.Study, caplog: pytest.LogCaptureFixture) -> str:
    """Return what a study without trials logs."""
    caplog.clear()
    optuna.logging.enable_propagation()
    with caplog.at_level(logging.WARNING, "optuna"):
        optimize_array(study, lambda trial: 1.0, 0, 1)
    optuna.logging.disable_propagation()
    return "\n".join(record.getMessage() for record in caplog.records)


def test_study_in_memory_in_a_job_array(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert logged(new_study(study_name="s"), caplog) == ""
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "4")
    warning = logged(new_study(study_name="s"), caplog)
    assert warning.startswith(
        "The study 's' is in the memory of this process, but SLURM runs 4 tasks of this job array"
    )


def test_sqlite_on_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Check that SQLite on a network file system is reported, and other storages and file systems are not."""
    database = f"sqlite:///{tmp_path}/study.db"
    assert logged(new_study(storage=database), caplog) == ""
    monkeypatch.setattr(storage_checks, "file_system_of", lambda path: "nfs4")
    warning = logged(new_study(storage=database, study_name="s"), caplog)
    assert warning.startswith(
        f"The study 's' is in the SQLite file {tmp_path}/study.db on a network file system (nfs4)"
    )
    journal = JournalStorage(JournalFileBackend(f"{tmp_path}/study.log"))
    assert logged(new_study(storage=journal), caplog) == ""
