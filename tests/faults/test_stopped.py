"""A stopped process is declared dead because its heartbeats stop; a busy process still sends them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from lightning_pipes import PipelineStrategy
from lightning_pipes.engine.watch.heartbeat import StallTimer
from lightning_pipes.ir import PlanError
from lightning_pipes.testing.ranks import RankResult, scale_timeout, watch_ranks
from tests.faults.training import EPOCHS, STEPS, Run, train

DEADLINE = 60.0


@dataclass(frozen=True)
class Case:
    """Ranks that stop themselves, and the time at which they are resumed.

    They continue after `seconds`, or if this is None, when all other ranks have ended.
    """

    ranks: int
    stopped: tuple[int, ...]
    place: str
    timeout: float
    rank_zero_hosts_store: bool = False
    harm: str = "stop"
    seconds: float | None = None


CASES = {
    "the last rank": Case(2, (1,), "forward", 5.0),
    "rank 0, with the store": Case(2, (0,), "save", 5.0, rank_zero_hosts_store=True),
    "one of four": Case(4, (2,), "step", 5.0),
    "all for a while": Case(2, (0, 1), "batch end", 5.0, rank_zero_hosts_store=True, seconds=8.0),
    "busy": Case(2, (1,), "forward", 4.0, harm="be busy"),
}


def alive(process: psutil.Process) -> bool:
    """Return whether a process is running and is not a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def processes(directory: Path, ranks: Iterable[int]) -> list[psutil.Process]:
    """Return the processes of the given ranks. They are not confused with later processes of the same number."""
    return [psutil.Process(int((directory / f"pid{rank}").read_text())) for rank in ranks]


def go_on(case: Case, directory: Path) -> None:
    """Wait until the ranks have stopped themselves, and resume them when the case requires it."""
    until = time.monotonic() + scale_timeout(DEADLINE)
    while not all((directory / f"harmed{rank}").exists() for rank in case.stopped) and time.monotonic() < until:
        time.sleep(0.05)
    stopped = processes(directory, case.stopped)
    others = processes(directory, [r for r in range(case.ranks) if r not in case.stopped])
    if case.seconds is not None:
        time.sleep(case.seconds)
    while any(map(alive, others)) and time.monotonic() < until:
        time.sleep(0.05)
    for process in stopped:
        process.resume()


def run(case: Case, directory: Path) -> list[RankResult]:
    """Train with the stopped or busy ranks of a case, and return the results of all ranks."""
    env = {}
    if case.rank_zero_hosts_store:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            env = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(free.getsockname()[1])}
    helper = threading.Thread(target=go_on, args=(case, directory), daemon=True)
    if case.harm == "stop":
        helper.start()
    task = Run(str(directory), case.harm, case.place, case.stopped, strategy={"heartbeat_timeout": case.timeout})
    return watch_ranks(train, case.ranks, task, timeout=DEADLINE, env=env)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[RankResult]]:
    """The results of all cases, which run concurrently because they spend most of their time waiting."""
    folders = [tmp_path_factory.mktemp("stopped") for _ in CASES]
    with ThreadPoolExecutor(len(CASES)) as pool:
        return dict(zip(CASES, pool.map(run, CASES.values(), folders), strict=True))


@pytest.mark.parametrize("name", ["the last rank", "rank 0, with the store", "one of four"])
def test_a_stopped_rank_is_declared_dead(name, outcomes):
    """The other ranks declare a stopped rank dead and end, and the rank itself reports this when it is resumed."""
    case = CASES[name]
    (victim,) = case.stopped
    who = f"rank {victim} (stage {case.ranks - 1 - victim}) was declared dead by rank"
    if case.rank_zero_hosts_store:
        who = "rank 0, which hosts the store of this run, has not answered rank 1 for 5 s"
    for o in outcomes[name]:
        assert o.exitcode == 1
        if o.rank != victim:
            assert who in o.error
            assert "PeerFailure" in o.error
            assert o.seconds <= outcomes[name][victim].seconds  # the victim could continue only after that
    own = outcomes[name][victim].error
    assert who in own, "a rank that continues does not learn that it was declared dead"


# If one rank stops before the other has reached its place, the other waits for it and rightly declares it dead.
@pytest.mark.parametrize("name", [pytest.param("all for a while", marks=pytest.mark.slow), "busy"])
def test_late_rank_is_not_declared_dead(name, outcomes):
    """Ranks that are busy, or that are all stopped together, complete their training without an error."""
    for o in outcomes[name]:
        assert o.error == ""
        assert o.value["steps"] == EPOCHS * STEPS
    assert outcomes[name][0].seconds > CASES[name].timeout


def test_silence_is_measured_by_the_clock_of_the_listener():
    """Time in which the listening process itself was stopped does not count as silence of the other process."""
    silence = StallTimer(gap=2.0)
    assert [silence.stalled_seconds(7, now) for now in (100.0, 101.0, 102.5)] == [0.0, 1.0, 2.5]
    assert silence.stalled_seconds(8, 103.0) == 0.0
    assert silence.stalled_seconds(8, 104.0) == 1.0
    assert silence.stalled_seconds(8, 1104.0) == 3.0  # the listening process itself was stopped for most of this time


def test_heartbeat_timeout_is_checked_at_once():
    for wrong in (0, 1.9, -3, float("nan")):
        with pytest.raises(PlanError, match="heartbeat_timeout must be at least 2 seconds"):
            PipelineStrategy(heartbeat_timeout=wrong)
