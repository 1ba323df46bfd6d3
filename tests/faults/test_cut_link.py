"""Two hosts lose sight of each other: nothing breaks, bytes only cease to arrive."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_pipes.testing import namespaces
from tests.faults.training import Run, train

TIMEOUT, SOON = 5.0, 8.0
needs_hosts = pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not())


@pytest.mark.root
@needs_hosts
@pytest.mark.parametrize("place", ["forward", pytest.param("save", marks=pytest.mark.slow)])
def test_both_ends_notice_a_cut_link(place: str, tmp_path: Path) -> None:
    run = Run(str(tmp_path), "cut", place, (1,), strategy={"heartbeat_timeout": TIMEOUT})
    with namespaces.Hosts(2) as hosts:
        with_store, without = hosts.watch_ranks(train, run)
    assert time.monotonic() - float((tmp_path / "harmed1").read_text()) < TIMEOUT + SOON
    for o in (with_store, without):
        assert o.exitcode == 1
        assert "PeerFailure" in o.error
    assert "rank 1 (stage 0) was declared dead by rank 0: no sign of life for 5 s" in with_store.error
    assert "rank 0, which hosts the store of this run, has not answered rank 1 for 5 s" in without.error


@pytest.mark.root
@needs_hosts
def test_hosts_vanish_with_their_owner() -> None:
    code = (
        "import os, signal\n"
        "from lightning_pipes.testing.namespaces import Hosts\n"
        "with Hosts(1) as hosts:\n"
        "    process = hosts.start(0, ['sleep', 'infinity'], {})\n"
        "    print(process.pid, *hosts.holders, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False, timeout=60)
    pids = found.stdout.split()
    assert len(pids) == 2
    until = time.monotonic() + 40  # the kernel takes its time to remove a network
    while any(map(is_there, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(map(is_there, pids))


def is_there(pid: str) -> bool:
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
