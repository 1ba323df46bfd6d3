"""The network laboratory: links have the bandwidth that was set, also during use, and all processes end with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.harness import namespaces
from benchmarks.harness.netlab import GOODPUT, Competition, NetLab, lab_unavailable_reason
from lightning_pipes.cost import Link
from lightning_pipes.engine import FailureWatch, GlooTransport, make_transport
from lightning_pipes.engine.messages.links import measure_links
from lightning_pipes.ir import Plan, PlanError
from lightning_pipes.testing.ranks import scale_timeout

pytestmark = [pytest.mark.root, pytest.mark.skipif(bool(lab_unavailable_reason()), reason=lab_unavailable_reason())]


@pytest.fixture(scope="module")
def lab() -> Iterator[NetLab]:
    with NetLab(3) as lab:
        yield lab


def speed(*traffic: Competition, seconds: float = 0.4) -> float:
    """Return the bytes per second that competing traffic receives, measured after a change has taken effect."""
    time.sleep(0.2)
    before, began = sum(each.received for each in traffic), time.monotonic()
    time.sleep(seconds)
    return (sum(each.received for each in traffic) - before) / (time.monotonic() - began)


def assert_speed(bandwidth: float, *traffic: Competition, within: float = 0.0) -> None:
    """Wait until traffic receives `bandwidth` bytes per second, up to 10 % or `within`.

    On a busy machine, the speed may be lower for a while, and then higher because bytes have waited for the receiver.
    """
    found: list[float] = []
    until = time.monotonic() + scale_timeout(10)
    while not found or found[-1] != pytest.approx(bandwidth, rel=0.1, abs=within):
        assert time.monotonic() < until, f"{found} bytes a second come through of {bandwidth:.3g}"
        found.append(speed(*traffic))


@pytest.mark.alone
class TestShaping:
    def test_speeds_change_while_messages_are_on_their_way(self, lab: NetLab) -> None:
        with lab.compete_on(0, 1, flows=2) as traffic:
            for bandwidth in (4e6, 1e6, 1e7):
                lab.shape(bandwidth, [(0, 1)])
                assert_speed(bandwidth, traffic)

    def test_less_urgent_messages_wait(self) -> None:
        with NetLab(2, 2e6, bands=True) as lab, lab.compete_on(0, 1) as bulk:
            for sender in bulk.senders:
                sender.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, 2)
            time.sleep(1.0)  # earlier bytes have arrived
            with lab.compete_on(0, 1) as urgent:
                assert_speed(2e6, urgent)
                assert_speed(0.0, bulk, within=0.1 * 2e6)
            assert_speed(2e6, bulk)

    def test_each_direction_and_cable_has_its_own(self, lab: NetLab) -> None:
        lab.shape(2e6, [(0, 1)])
        lab.shape(6e6, [(1, 0)])
        lab.shape(4e6, [(2, 0)])  # the links form a closed ring
        with lab.compete_on(0, 1) as there, lab.compete_on(1, 0) as back, lab.compete_on(2, 0) as around:
            assert_speed(2e6, there)
            assert_speed(6e6, back)
            assert_speed(4e6, around)

    def test_none_takes_the_limit_away(self, lab: NetLab) -> None:
        lab.shape(2e6)
        lab.shape(None)
        assert set(lab.links.values()) == {Link()}
        with lab.compete_on(0, 1) as traffic:
            assert speed(traffic) > 1e7  # a quiet machine reaches a hundred times as much

    def test_set_times(self, lab: NetLab) -> None:
        lab.shape(8e6)
        with lab.play_changes([(0.0, 2e6, [(0, 1)]), (60.0, 1e6, None)]), lab.compete_on(0, 1) as traffic:
            assert_speed(2e6, traffic)
        assert lab.links[0, 1].bandwidth == 2e6  # the later change is cancelled
        assert lab.links[1, 0].bandwidth == 8e6

    def test_connections_share_a_link(self, lab: NetLab) -> None:
        lab.shape(6e6, [(0, 1)])
        with lab.compete_on(0, 1) as one, lab.compete_on(0, 1, flows=3, on=0.05, off=0.05) as others:
            time.sleep(0.5)
            assert_speed(6e6, one, others)
        assert one.received < 0.9 * (one.received + others.received)
        assert others.received > 0

    def test_invalid_link_settings_are_refused(self, lab: NetLab) -> None:
        before = lab.links
        with pytest.raises(PlanError, match="bandwidth > 0"):
            lab.shape(0.0)
        with pytest.raises(KeyError, match="no link from rank 1 to rank 1"):
            lab.shape(1e6, [(1, 1)])
        assert lab.links == before


def measured(rank: int) -> tuple[str, dict[tuple[int, int], Link]]:
    """Return the class of the transport that is chosen automatically, and the measured links of this rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    watch = FailureWatch(dist.distributed_c10d._get_default_store(), rank)
    plan = Plan.even(3, 3)
    transport = make_transport(plan, rank, range(3), torch.device("cpu"), watch)
    # half a second, so that a short disturbance does not matter
    links = measure_links(plan, rank, transport, sizes=(2**12, 2**17), repeats=31)
    transport.close()
    watch.close()
    return type(transport).__name__, links


@pytest.mark.alone
def test_ranks_find_the_links_as_they_were_set(lab: NetLab) -> None:
    lab.shape(8e6)
    lab.shape(2e6, [(1, 2)])
    asked = {(0, 1): 8e6, (1, 0): 8e6, (1, 2): 2e6, (2, 1): 8e6}
    seen: list[dict[tuple[int, int], float]] = []
    right = set[tuple[int, int]]()
    while right < set(asked):  # other programs on this machine may delay messages for a whole measurement
        assert len(seen) < 12, seen
        found = lab.run_ranks(measured, timeout=60)
        assert [name for name, _ in found] == [GlooTransport.__name__] * 3
        seen.append({key: link.bandwidth for _, each in found for key, link in each.items()})
        right |= {key for key, bandwidth in seen[-1].items() if bandwidth == pytest.approx(asked[key], rel=0.1)}
    assert lab.links[1, 2] == Link(2e6, burst=GOODPUT * 8192)


@pytest.mark.parametrize(("ends", "code"), [("true", 0), ("exit $RANK", 1)])
def test_a_command_on_every_host(tmp_path: Path, ends: str, code: int) -> None:
    """The command line runs a command on every host with the variables of its rank, and fails if one of them fails."""
    command = ["sh", "-c", f"echo $WORLD_SIZE $MASTER_ADDR > {tmp_path}/$RANK; {ends}"]
    netlab = [sys.executable, "-m", "benchmarks.netlab", "run", "-n", "2", "--bandwidth", "1e6", "--"]
    ran = subprocess.run([*netlab, *command], cwd=Path(__file__).parents[2], check=False, timeout=600)
    assert ran.returncode == code
    ranks = ("0", "1") if not code else ("1",)  # a command that still runs when another fails is killed
    assert [(tmp_path / rank).read_text() for rank in ranks] == [f"2 {namespaces.host_address(0)}\n"] * len(ranks)


OWNER = """
import os, signal, sys
from benchmarks.harness.netlab import NetLab
def rank_main(rank):
    print(os.getpid(), flush=True)
    signal.pause()
if __name__ == "__main__":
    with NetLab(2, 1e6) as lab:
        print(*lab.holders, lab.start(0, ["sleep", "infinity"], {}).pid, flush=True)
        lab.run_ranks(rank_main)
"""


def is_there(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.alone
def test_nothing_is_left_when_the_owner_is_killed(tmp_path: Path) -> None:
    """The processes of the ranks and hosts end when the owner is killed."""
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    owner = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pids = [int(word) for _ in range(3) for word in owner.stdout.readline().split()]
    networks = {os.readlink(f"/proc/{pid}/ns/net") for pid in pids}
    assert len(pids) == 5
    assert len(networks) == 2  # the ranks run on the hosts
    owner.kill()
    owner.communicate(timeout=scale_timeout(30))
    until = time.monotonic() + scale_timeout(40)  # the kernel takes some time to remove a network
    while any(map(is_there, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(map(is_there, pids))
    assert namespaces.kill_orphans() == []


@pytest.mark.alone
def test_clean_kills_what_slipped_through_and_nothing_else() -> None:
    """`kill_orphans` kills processes whose owner has ended, and leaves processes of a living owner alone."""
    here = f"{os.getpid()} {Path('/proc/self/stat').read_text().rpartition(')')[2].split()[19]}"
    sleepers = []
    # no process, a process number that was reused, a living owner
    for owner in ("4194304 1", f"{os.getpid()} 1", here):
        env = {**os.environ, "LIGHTNING_PIPES_HOSTS_OWNER": owner}
        sleepers.append(subprocess.Popen(["sleep", "infinity"], env=env, preexec_fn=namespaces.die_with_parent))
    try:
        assert {*namespaces.kill_orphans()} == {sleeper.pid for sleeper in sleepers[:2]}
        assert [sleeper.wait(timeout=scale_timeout(30)) for sleeper in sleepers[:2]] == [-signal.SIGKILL] * 2
        assert sleepers[2].poll() is None
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()
