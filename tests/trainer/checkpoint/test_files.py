"""Tests that a whole checkpoint exists under its name if the process is killed at any point of a write."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.checkpoint import files
from lightning_pipes.trainer.checkpoint.files import (
    AtomicCheckpointIO,
    find_existing,
    local_path,
    put,
    remove,
    temporary_for,
)

STEPS = ("torch.save", "os.fsync", "os.replace", "os.rename", "_exchange", "_remove_now")
"""Functions at which a process is killed, either before or after the call."""


def write_file(path: Path, value: int) -> None:
    AtomicCheckpointIO().save_checkpoint({"value": value, "rest": torch.zeros(50_000)}, path)


def write_folder(path: Path, value: int) -> None:
    temporary = temporary_for(path)
    temporary.mkdir()
    files.save(value, temporary / "a")
    files.save(value, temporary / "b")
    put(temporary, path)


def write_folder_in_two_steps(path: Path, value: int) -> None:
    """Write a folder as on file systems that cannot exchange two names."""
    files._exchange = lambda a, b: False
    write_folder(path, value)


def read(path: Path) -> Any:
    path = find_existing(path)
    if path.is_dir():
        values = [torch.load(path / name) for name in ("a", "b")]
        assert values[0] == values[1]
        assert len(os.listdir(path)) == 2
        return values[0]
    return torch.load(path)["value"]


def killed(write: Callable[[Path, int], None], path: Path, step: str, after: bool) -> bool:
    """Return whether a forked child was killed at this step of its write, which may not have the step."""
    pid = os.fork()
    if pid == 0:
        *module, name = step.split(".")
        owner: Any = files if not module else getattr(files, module[0])
        original = getattr(owner, name)

        def end(*args: Any) -> Any:
            if after:
                original(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner, name, end)
        try:
            write(path, 2)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def all_kills(rank: int) -> list[tuple[str, ...]]:
    """Return all places at which a child was killed, after checking the files left there.

    This runs in a process of its own because it forks.
    """
    found = []
    writers = (write_file, write_folder, write_folder_in_two_steps)
    for before in writers[:2]:
        for write in writers:
            for step in STEPS:
                for after in (False, True):
                    with TemporaryDirectory() as folder:
                        path = Path(folder) / "last.ckpt"
                        before(path, 1)
                        if killed(write, path, step, after):
                            found.append((before.__name__, write.__name__, step, str(after)))
                            assert read(path) in (1, 2), found[-1]
                        write_file(Path(folder) / "next.ckpt", 3)  # this cleans up
                        assert {n for n in os.listdir(folder) if n.endswith(".saving")} == set(), found[-1]
                        write_folder(path, 4)
                        assert read(path) == 4
    return found


def test_a_kill_leaves_the_one_before_or_the_new_one():
    found = run_ranks(all_kills, 1, timeout=60)[0]
    for write in ("write_file", "write_folder", "write_folder_in_two_steps"):
        assert len([f for f in found if f[1] == write]) >= 10
    assert ("write_folder", "write_folder_in_two_steps", "os.rename", "True") in found  # between the two steps


def full_disk(rank: int, folder: str) -> tuple[str, Any, list[str]]:
    """Overwrite a checkpoint on a full disk, and return the error, the value that is read, and the files left."""
    path = Path(folder) / "a.ckpt"
    write_file(path, 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    with pytest.raises(OSError, match="File too large") as error:  # torch would report "unexpected pos"
        write_file(path, 2)
    return str(error.value), read(path), os.listdir(folder)


def test_a_full_disk_leaves_the_one_before(tmp_path):
    _, value, left = run_ranks(full_disk, 1, str(tmp_path), timeout=30)[0]
    assert (value, left) == (1, ["a.ckpt"])


def test_links_are_replaced_and_not_followed(tmp_path):
    for write in (write_file, write_folder):
        write(tmp_path / "target", 1)
        link = tmp_path / "link"
        link.unlink(missing_ok=True)
        link.symlink_to("target")
        write_folder(link, 2)
        assert (read(link), read(tmp_path / "target")) == (2, 1)
        remove(link)
        assert read(tmp_path / "target") == 1
        remove(tmp_path / "target")
    assert os.listdir(tmp_path) == []


def test_others_files_are_left_alone(tmp_path):
    """Check that a write keeps the temporary files of a live process and of another host.

    These processes may still be writing.
    """
    names = [f".a.elsewhere.{2**22 + 1}-0.saving", f".a.{os.uname().nodename}.{os.getpid()}-0.saving", ".b.saving"]
    for name in names:
        (tmp_path / name).touch()
    write_file(tmp_path / "a", 1)
    assert sorted(os.listdir(tmp_path)) == sorted([*names, "a"])


def test_path_outside_of_a_file_system():
    assert local_path("s3://bucket/a.ckpt") is None
    assert local_path("file:///tmp/a.ckpt") == local_path("/tmp/a.ckpt") == Path("/tmp/a.ckpt")
