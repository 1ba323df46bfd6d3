"""The link between two hosts is cut or becomes very slow. No connection is closed, but bytes do not arrive."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.harness import namespaces, netlab
from benchmarks.harness.emulated import Emulation, sleeping_layer
from lightning_pipes.engine import Engine, Item
from lightning_pipes.ir import SEND_KINDS, Plan
from lightning_pipes.planning.measured import Averages, StepSample
from lightning_pipes.planning.partition import even_partition
from lightning_pipes.planning.tuning import LinkEffect, effect_of
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.testing.ranks import scale_timeout
from tests.engine.pipes import connect
from tests.faults.training import Run, train

TIMEOUT, SOON = 5.0, 80.0
"""Seconds. On a machine that is not busy, all ranks end 8 s after the timeout; a rank that hangs waits half an hour."""
needs_hosts = pytest.mark.skipif(bool(namespaces.unavailable_reason()), reason=namespaces.unavailable_reason())


@pytest.mark.root
@needs_hosts
@pytest.mark.parametrize("place", ["forward", "save"])
def test_both_ends_notice_a_cut_link(place: str, tmp_path: Path) -> None:
    """If the link between two hosts is cut, both ranks end after the heartbeat timeout with errors that explain it."""
    run = Run(str(tmp_path), "cut", place, (1,), strategy={"heartbeat_timeout": TIMEOUT})
    with namespaces.Hosts(2) as hosts:
        with_store, without = hosts.watch_ranks(train, run, timeout=120)
    assert time.monotonic() - float((tmp_path / "harmed1").read_text()) < TIMEOUT + scale_timeout(SOON)
    for o in (with_store, without):
        assert o.exitcode == 1
        assert "PeerFailure" in o.error
    seconds = r"for \d+ s"
    assert re.search(rf"rank 1 \(stage 0\) was declared dead by rank 0: no heartbeat {seconds}", with_store.error)
    assert re.search(rf"rank 0, which hosts the store .*, has not answered rank 1 {seconds}", without.error)


MESSAGE, FAST, CRAWLING = 32 * 1024, 4e6, 16e3


def crawl(rank: int, folder: str) -> list[tuple[LinkEffect, float]]:
    """Run one step over slow links and one step over fast links.

    Returns:
        For each step, the measured effect of the links, and the seconds of the message that this rank received.
    """
    torch.set_num_threads(1)
    plan = Plan.even(2, 1, layers=even_partition([1.0, 1.0], 2))
    layer = sleeping_layer(0.01, 0.02, message_bytes=MESSAGE)
    emulation = Emulation(plan, OneFOneB().program(plan), (layer,) * 2, (1.0,) * 2)
    watch, transport = connect(rank, plan)
    engine = Engine(plan, emulation.order, emulation.stages(rank), transport, rank=rank, watch=watch)
    found = []
    for number in range(2):
        wait_for(Path(folder, f"set{number}"))
        engine.inject(Item(0, 1))
        engine.drain()
        mine = StepSample.from_events(engine.events, plan)
        step: list[StepSample] = [mine, mine]
        dist.all_gather_object(step, mine)
        averages = Averages()
        averages.add(step)
        (takes,) = (mean for (kind, _, _), mean in mine.means.items() if kind in SEND_KINDS)
        found.append((effect_of(plan, averages.costs()), takes / 1e9))
        Path(folder, f"ran{number}").touch()
    engine.close()
    watch.close()
    return found


def wait_for(path: Path) -> None:
    """Wait until a file exists."""
    until = time.monotonic() + scale_timeout(50)
    while not path.exists():
        assert time.monotonic() < until, path
        time.sleep(0.01)


@pytest.mark.root
@pytest.mark.skipif(bool(netlab.lab_unavailable_reason()), reason=netlab.lab_unavailable_reason())
def test_a_link_that_falls_to_nearly_nothing_is_waited_for_and_seen(tmp_path: Path) -> None:
    """A step over very slow links completes, and the measured durations show that the bandwidth limits it."""
    with netlab.NetLab(2) as lab:

        def shapes() -> None:
            for number, bandwidth in enumerate((CRAWLING, FAST)):
                if number:
                    wait_for(tmp_path / "ran0")
                lab.shape(bandwidth)
                (tmp_path / f"set{number}").touch()

        shaping = threading.Thread(target=shapes)
        shaping.start()
        found = lab.run_ranks(crawl, str(tmp_path), timeout=60)
        shaping.join()
    for (regime, crawling), (_, fast) in found:
        assert regime is LinkEffect.BANDWIDTH
        assert crawling > 0.8 * (MESSAGE - netlab.BURST) / CRAWLING
        assert fast < 0.1 * crawling


@pytest.mark.root
@needs_hosts
def test_hosts_vanish_with_their_owner() -> None:
    """When the owner of emulated hosts is killed, all their processes end."""
    code = (
        "import os, signal\n"
        "from benchmarks.harness.namespaces import Hosts\n"
        "with Hosts(1) as hosts:\n"
        "    process = hosts.start(0, ['sleep', 'infinity'], {})\n"
        "    print(process.pid, *hosts.holders, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False, timeout=scale_timeout(60)
    )
    pids = found.stdout.split()
    assert len(pids) == 2
    until = time.monotonic() + scale_timeout(40)  # the kernel takes some time to remove a network
    while any(map(is_there, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(map(is_there, pids))


def is_there(pid: str) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
