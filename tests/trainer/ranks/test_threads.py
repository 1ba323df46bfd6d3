"""Tests that each rank computes with its share of the cores, whichever launcher started it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from lightning_pipes.testing.ranks import run_environment, run_ranks
from lightning_pipes.trainer.ranks import threads
from lightning_pipes.trainer.ranks.threads import Cores, threads_of_process
from tests.launch.example import ROOT, STARTUP
from tests.trainer.ranks.noting import noted


def fitted(rank: int, given: str | None) -> set[int]:
    """Return the thread counts of a rank on a host with 6 cores.

    `given` is the number of threads in OMP_NUM_THREADS, or None if it is unset.
    """
    os.environ.pop("OMP_NUM_THREADS")
    if given is not None:
        os.environ["OMP_NUM_THREADS"] = given
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
        return noted(2)


def test_ranks_share_the_cores() -> None:
    assert run_ranks(fitted, 2, None) == [{3}, {3}]


def test_what_is_asked_for_stays() -> None:
    assert run_ranks(fitted, 2, "1") == [{1}, {1}]


SCRIPT = """
    import os, sys
    os.sched_getaffinity = lambda _: set(range(6))
    from tests.trainer.ranks.noting import noted
    for _ in range(2):  # the launcher leaves OMP_NUM_THREADS behind in the first
        os.write(1, f"{noted(2)} ".encode())  # in one piece: both ranks write here
"""


def test_ranks_that_lightning_starts(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT) + "os.write(1, f\"{os.environ.get('OMP_NUM_THREADS')} \".encode())\n")
    clean = run_environment("threads", tmp_path)  # the Trainers of other tests leave LOCAL_RANK in our environment
    given = {key: value for key, value in clean.items() if key != "OMP_NUM_THREADS"}
    given["PYTHONPATH"] = f"{STARTUP}{os.pathsep}{ROOT}"
    done = subprocess.run([sys.executable, str(script)], env=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["None"] * 2 + ["{3}"] * 4


def cores(*numbers: int, **more: Any) -> Cores:
    return Cores("host", frozenset(numbers), **more)


def test_shares() -> None:
    """Check the number of threads of one, two and more processes on the same cores, and on another host."""
    two = cores(0, 1)
    assert threads_of_process(two, [two]) == 2
    assert threads_of_process(two, [two] * 2) == 1
    assert threads_of_process(two, [two] * 5) == 1
    sixteen = cores(*range(16))
    assert threads_of_process(sixteen, [sixteen] * 4) == 4
    assert threads_of_process(sixteen, [sixteen] * 3) == 5
    assert threads_of_process(sixteen, [sixteen, Cores("another", sixteen.cores)]) == 16


def test_a_process_that_is_bound_to_cores_of_its_own_has_all_of_them() -> None:
    """Check that a bound process uses all of its cores. SLURM binds tasks like this."""
    tasks = [cores(*range(4 * n, 4 * n + 4)) for n in range(4)]
    assert [threads_of_process(task, tasks) for task in tasks] == [4] * 4
    assert threads_of_process(tasks[0], [*tasks, cores(0, 1)]) == 3


def test_a_container_has_what_it_is_allowed() -> None:
    mine = cores(*range(64), group="a", allowed=8.0)
    other = cores(*range(64), group="b", allowed=2.0)
    assert threads_of_process(mine, [mine]) == 8
    assert threads_of_process(mine, [mine, mine, other, other]) == 4
    assert threads_of_process(other, [mine, mine, other, other]) == 1
    small = cores(*range(64), group="c", allowed=1.5)
    assert threads_of_process(small, [mine, small]) == 1


@pytest.mark.parametrize(
    ("files", "allowed"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.cfs_quota_us": "400000\n", "cpu.cfs_period_us": "100000\n"}, 4.0),
        ({"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_cores_of_a_control_group(files: dict[str, str], allowed: float | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert threads._allowed(tmp_path) == allowed
    assert isinstance(Cores.here().cores, frozenset)
