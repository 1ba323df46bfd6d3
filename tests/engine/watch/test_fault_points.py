"""Faults at named points: all points are listed, and a fault occurs at the requested point, time and rank."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import lightning_pipes
from lightning_pipes.engine.watch import fault_points
from lightning_pipes.engine.watch.fault_points import FAULT_POINTS, Fault
from lightning_pipes.ir import Kind

SCRIPT = """
from runpy import run_path
point = run_path({points!r})["fault_point"]  # without torch, which takes seconds to import
for number in range(1, 4):
    print(number, flush=True)
    point("F")
    point("B")
"""


def start(fault: Fault, rank: int = 0) -> subprocess.Popen[str]:
    """Start a process that passes the points F and B three times, with a fault requested in its environment."""
    env = {**os.environ, **fault.to_environment(), "RANK": str(rank)}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(points=fault_points.__file__)], env=env, stdout=subprocess.PIPE, text=True
    )


def test_every_place_is_listed_and_every_listed_one_exists():
    files = Path(lightning_pipes.__file__).parent.rglob("*.py")
    found = {name for file in files for name in re.findall(r"\bfault_point\(\"([^\"]+)\"\)", file.read_text())}
    assert found | set(Kind) == set(FAULT_POINTS)


@pytest.mark.parametrize(("act", "number"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)])
def test_it_comes_to_harm_at_that_passing(act, number, tmp_path):
    """The process is killed or stopped when it passes the point for the second time, and the time is recorded."""
    before = time.monotonic()
    process = start(Fault(1, "B", str(tmp_path / "at"), nth=2, act=act), rank=1)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert (os.WSTOPSIG(status) if act == "stop" else os.WTERMSIG(status)) == number
    assert before < float((tmp_path / "at").read_text()) < time.monotonic()
    process.kill()
    out, _ = process.communicate()
    assert out.split() == ["1", "2"]


def test_it_waits_until_it_may_continue(tmp_path):
    """A process with the fault "wait" continues when the file is deleted."""
    file = tmp_path / "at"
    process = start(Fault(0, "F", str(file), nth=3, act="wait"))
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(3)] == ["1\n", "2\n", "3\n"]
    until = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    assert process.poll() is None
    file.unlink()
    assert process.wait(60) == 0


def test_other_ranks_and_those_that_nobody_asks_go_on(tmp_path):
    """A fault of rank 0 does not affect rank 1."""
    process = start(Fault(0, "F", str(tmp_path / "at")), rank=1)
    out, _ = process.communicate(timeout=60)
    assert out.split() == ["1", "2", "3"]
    assert not (tmp_path / "at").exists()


def test_a_fault_that_can_not_be_is_refused():
    with pytest.raises(ValueError, match="there is no point 'nowhere'"):
        Fault(0, "nowhere", "")
    with pytest.raises(ValueError, match="can kill, stop or wait, not 'hurt'"):
        Fault(0, "F", "", act="hurt")
