"""Processes of one attempt find each other in a store that still contains values of ended processes."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from lightning_pipes.engine.watch import rendezvous, shared_store
from lightning_pipes.engine.watch.rendezvous import agree_on_name, launcher_store
from lightning_pipes.engine.watch.shared_store import run_store
from lightning_pipes.tune.run_name import run_name

SOON = timedelta(seconds=60)


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def join(pool: ThreadPoolExecutor, store: TCPStore, rank: int) -> Future[str]:
    """Let one of three ranks agree on a name in a thread, and return its future."""
    connection = TCPStore("127.0.0.1", store.port, is_master=False)
    return pool.submit(agree_on_name, connection, rank, 3, SOON)


def test_each_attempt_agrees_on_a_name_of_its_own(store):
    """All ranks of an attempt get the same name, attempts get different names, and no rank gets one too early."""
    names = []
    with ThreadPoolExecutor(3) as pool:
        for late in (0, 1, 2):  # without the late rank, the others see only keys of the previous attempt
            early = [join(pool, store, rank) for rank in range(3) if rank != late]
            time.sleep(0.2)
            assert not early[0].done()  # rank 0, or a rank that waits for rank 0
            found = {future.result() for future in [*early, join(pool, store, late)]}
            assert len(found) == 1
            names += found
    assert len(set(names)) == 3


def test_immediate_second_request_gets_another_name(store):
    """Ranks that immediately agree on a second name get a different one."""

    def twice(rank: int) -> list[str]:
        connection = TCPStore("127.0.0.1", store.port, is_master=False, timeout=SOON / 4)
        return [agree_on_name(connection, rank, 2, SOON / 4) for _ in range(2)]

    with ThreadPoolExecutor(2) as pool:
        zero, one = pool.map(twice, range(2))
    assert zero == one
    assert len(set(zero)) == 2


def test_rank_zero_does_not_wait_for_ever(store):
    with pytest.raises(TimeoutError, match="rank 1, 2 did not connect within 0 s"):
        agree_on_name(store, 0, 3, timedelta(seconds=0.1))


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Remove the variables of torchrun and SLURM from the environment."""
    for name in [name for name in os.environ if name.startswith(("TORCHELASTIC", "SLURM"))]:
        monkeypatch.delenv(name)
    return monkeypatch


def test_the_name_of_a_run_without_a_launcher_is_the_time(environment):
    assert re.fullmatch(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d", run_name())


def test_a_requeued_slurm_job_keeps_its_name(environment):
    environment.setenv("SLURM_PROCID", "1")
    environment.setenv("SLURM_JOB_ID", "4712")
    environment.setenv("SLURM_STEP_ID", "2")
    assert run_name() == "slurm-4712.2"
    environment.setenv("SLURM_ARRAY_JOB_ID", "4711")
    environment.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert run_name() == "slurm-4711_3.2"
    environment.setenv("SLURM_JOB_NAME", "interactive")
    assert not run_name().startswith("slurm")


def test_rank_that_comes_after_the_death_of_the_launcher_reports_it(environment):
    """A rank whose launcher has ended raises an error that names the launcher."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # no process listens
        for name, value in {
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(unused.getsockname()[1]),
        }.items():
            environment.setenv(name, value)
        with pytest.raises(ConnectionRefusedError, match="the launcher has ended"):
            launcher_store(SOON)


def test_a_launcher_that_is_stopped_is_not_waited_for_without_end(environment):
    """A connection to a launcher that does not answer ends after the timeout."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # the kernel accepts connections for a stopped process
        environment.setenv("MASTER_ADDR", "127.0.0.1")
        environment.setenv("MASTER_PORT", str(silent.getsockname()[1]))
        with pytest.raises(TimeoutError, match="the launcher has not answered within 1 s"):
            launcher_store(timedelta(seconds=1))


HOST = """
import time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("sent", "seconds", "error", "message"),
    [
        (signal.SIGSTOP, 5, TimeoutError, "the launcher has not answered within 5 s"),
        (
            signal.SIGKILL,
            600,
            ConnectionError,
            "the launcher, which hosts the store of this run, has ended|it hosted the store",
        ),
    ],
)
def test_a_launcher_that_stops_or_ends_while_ranks_meet_is_named(
    sent, seconds, error, message, environment, monkeypatch
):
    """If the launcher is stopped or killed while the ranks connect, a rank raises an error, and does not wait longer
    than the timeout.
    """
    host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
    try:
        environment.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        environment.setenv("MASTER_ADDR", "127.0.0.1")
        environment.setenv("MASTER_PORT", host.stdout.readline().strip())
        environment.setenv("GLOO_SOCKET_IFNAME", "lo")
        monkeypatch.setattr(shared_store, "_store", None)
        looks = itertools.count()

        def check():
            if next(looks) == 5:  # rank 1 has requested the name by then, or requests it from a stopped host
                host.send_signal(sent)

        with pytest.raises(error, match=message):
            run_store(1, 2, 2, timedelta(seconds=seconds), check)
    finally:
        host.kill()
        host.wait()
        host.stdout.close()


def test_ended_rank_is_not_awaited(monkeypatch):
    """A rank that was alive and has ended is reported immediately.

    Ended processes of an earlier attempt, which were never seen alive, are not counted as ranks of this attempt.
    """
    alive = {"own": True, "old": False}

    class Seen:
        def __init__(self, name):
            self.name = name

        def has_ended(self):
            return not alive[self.name]

    class Store(dict):
        def check(self, keys):
            return all(key in self for key in keys)

    monkeypatch.setattr(rendezvous.Process, "parse", Seen)
    store = Store({"lightning_pipes/asks/1": b"7", "lightning_pipes/place/7": b"old"})
    living = rendezvous._LivenessCheck(store)
    living.check_rank(2)
    living.check_rank(1)
    store |= {"lightning_pipes/asks/1": b"8", "lightning_pipes/place/8": b"own"}
    living.check_rank(1)
    alive["own"] = False
    with pytest.raises(ConnectionAbortedError, match="rank 1 has ended before all ranks had connected"):
        living.check_rank(1)
