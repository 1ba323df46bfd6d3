"""Tests that the ranks of a study do not wait for a rank 0 that has stopped or died."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_pipes.engine.watch.launcher import RankStoppedError
from lightning_pipes.engine.watch.process_exit import SerialCaller
from lightning_pipes.testing.ranks import find_processes, run_environment, scale_timeout, wait_until
from lightning_pipes.tune.studies.leader_store import PORT_VARIABLE, LeaderStore


def test_ranks_end_if_rank_0_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a rank ends if rank 0 was stopped.

    The store client of torch would wait for its answer forever.
    """
    answer = threading.Event()

    def check(keys: list[str]) -> bool:
        answer.wait()
        return True

    def look() -> Any:
        raise RankStoppedError("local rank 0 has been stopped")

    store = LeaderStore()
    line = SimpleNamespace(hosted=False, caller=SerialCaller(), startup_watch=SimpleNamespace(check=look), seal=None)
    monkeypatch.setattr(store, "_connection", line)
    monkeypatch.setattr(store, "_store", SimpleNamespace(check=check))
    with pytest.raises(RankStoppedError):
        store.get("end")
    answer.set()


_RANK_1 = """
import os, sys
from lightning_pipes.tune.studies.leader_store import LeaderStore
print("here", flush=True)
sys.stdin.read()  # until the launcher has ended
LeaderStore()
"""
_LAUNCHER = """
import os, subprocess, sys
env = {**os.environ, "LIGHTNING_PIPES_LAUNCHER": str(os.getpid())}
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
os._exit(1)
"""


def test_rank_that_waits_for_rank_0_ends_with_its_launcher(tmp_path: Path) -> None:
    """Check that a rank which waits for rank 0 ends with its launcher.

    Lightning's launcher is rank 0. It has started the other ranks, and dies before it listens.
    """
    token = f"leader_store {os.getpid()}"
    env = {**run_environment(token, tmp_path), "LOCAL_RANK": "1", PORT_VARIABLE: "9"}  # where no process listens
    command = [sys.executable, "-c", _LAUNCHER, _RANK_1]
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}  # the rank has the latter, too
    done = subprocess.run(command, env=env, text=True, timeout=scale_timeout(60), check=False, **out)
    assert int(done.stdout)
    assert wait_until(lambda: not find_processes(token), scale_timeout(20))
