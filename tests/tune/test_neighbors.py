"""Processes of a `Neighbor` use the given share of the given core, and end with the process that started them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from lightning_pipes.ir import PlanError
from lightning_pipes.testing.ranks import scale_timeout, wait_until
from lightning_pipes.tune import neighbors
from lightning_pipes.tune.neighbors import NEIGHBOR_KINDS, Neighbor, Quota, why_no_quota

CORE = min(os.sched_getaffinity(0))
SCRIPT = """
import sys, time
from lightning_pipes.tune.neighbors import Neighbor
with Neighbor("spin", processes=2) as there:
    print(*there.pids, flush=True)
    time.sleep(600)
"""


def cpu(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def count_throttled(quota: Quota) -> int:
    """Return the number of times that the kernel has throttled the processes of a quota."""
    lines = (quota._group / "cpu.stat").read_text().split()
    return int(lines[lines.index("nr_throttled") + 1])


@pytest.mark.parametrize("kind", NEIGHBOR_KINDS)
def test_it_works_on_its_core_from_the_start(kind):
    """Each process runs on the given core, uses CPU time immediately, and ends with the context."""
    with Neighbor(kind, core=CORE, processes=2) as there:
        assert [os.sched_getaffinity(pid) for pid in there.pids] == [{CORE}] * 2
        deadline = time.monotonic() + scale_timeout(10)
        before = [cpu(pid) for pid in there.pids]
        while not all(cpu(pid) > used for pid, used in zip(there.pids, before, strict=True)):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        pids = there.pids
    assert not any(map(psutil.pid_exists, pids))
    assert there.pids == []


def test_it_rests_in_between(monkeypatch):
    """The process works for the given share of each period, on a virtual clock that work and rest advance."""
    now, worked, turns = 100.0, 0.0, 50

    def work() -> None:
        nonlocal now, worked
        now, worked = now + 0.0005, worked + 0.0005

    def rest(seconds: float) -> None:
        nonlocal now
        now += seconds

    def parent() -> int:
        nonlocal turns
        turns -= 1
        return 1 if turns >= 0 else 2

    clock = SimpleNamespace(monotonic=lambda: now, sleep=rest)
    system = SimpleNamespace(getppid=parent, nice=lambda _: 0, write=lambda *_: 0)
    monkeypatch.setattr(neighbors, "time", clock)
    monkeypatch.setattr(neighbors, "os", system)
    monkeypatch.setitem(NEIGHBOR_KINDS, "spin", lambda: work)
    neighbors.main(["spin", "0.1", "-1", "0", "1"])
    # one unit of work before the first period
    assert worked == pytest.approx(0.0005 + 50 * 0.1 * neighbors.PERIOD_SECONDS, rel=1e-6)
    assert now == pytest.approx(100.0005 + 50 * neighbors.PERIOD_SECONDS, rel=1e-6)


def processes_gone(pids: list[int]) -> None:
    """Wait until all processes have ended."""
    deadline = time.monotonic() + scale_timeout(10)
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_it_ends_with_the_process_that_started_it():
    parent = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.kill()
    parent.wait()
    parent.stdout.close()
    processes_gone(pids)


@pytest.mark.skipif(why_no_quota() is not None, reason=f"no quotas here: {why_no_quota()}")
def test_a_quota_holds_a_process_back():
    """The kernel throttles a process in a quota, and the control group is removed when the quota ends."""
    groups = Path("/proc/self/cgroup").read_text()
    with Neighbor("spin") as there:
        with Quota(0.1, there.pids[0]) as quota:
            assert wait_until(lambda: count_throttled(quota) > 2, scale_timeout(20))
        assert not quota._group.exists()
        with Quota(0.1, there.pids[0]) as quota:
            there.__exit__()  # the process ends within the quota
    assert not quota._group.exists()
    assert Path("/proc/self/cgroup").read_text() == groups


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("dance",), "there is no neighbor 'dance'; there is spin, matmul"),
        (("spin", 0), "intensity must be above 0 and at most 1, got 0"),
        (("spin", 2.0), "intensity must be above 0 and at most 1"),
        (("spin", 1.0, 4096), "core must be one of"),
        (("spin", 1.0, None, 0), "processes must be at least 1"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(PlanError, match=message):
        Neighbor(*arguments)


@pytest.mark.skipif(why_no_quota() is not None, reason=f"no quotas here: {why_no_quota()}")
def test_weight_is_passed_to_the_kernel():
    """The weight of a quota is written to the file of its control group, for both versions of control groups."""
    with Neighbor("spin") as there, Quota(None, there.pids[0], 1000) as quota:
        new, old = quota._group / "cpu.weight", quota._group / "cpu.shares"
        assert (new.read_text() == "1000\n") if new.exists() else (old.read_text() == "10240\n")
        assert (quota._group / "cgroup.procs").read_text().split() == [str(there.pids[0])]


def test_a_quota_of_nothing():
    with pytest.raises(PlanError, match="cores must be above 0"):
        Quota(0)
    with pytest.raises(PlanError, match="weight must be 1 to 10000"):
        Quota(None, weight=0)
