"""Runs in separate interpreters with a launcher. If a process dies, stops or is terminated, the others end soon.

Processes end like the processes of users, with the complete shutdown of Python.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from lightning_pipes.engine.watch import launcher
from lightning_pipes.testing.ranks import find_processes, scale_timeout
from tests.launch.example import environment
from tests.launch.fit import HEARTBEAT_TIMEOUT, STOPS

SCRIPT = str(Path(__file__).with_name("fit.py"))
START = 300.0
"""The limit for the start in seconds. Two interpreters import Lightning one after the other."""
SOON = 40.0
"""The limit for the end in seconds on a busy machine, where the end of an interpreter alone takes five seconds.

The time limits of the package are below ten seconds.
"""


@dataclass
class Script:
    """A launched script with two ranks.

    Attributes:
        launched: the process of the launcher. With Lightning's launcher, this is rank 0.
        folder: the working directory, where ranks report their progress.
        token: the token that all processes of the run inherit.
    """

    launched: subprocess.Popen[str]
    folder: Path
    token: str

    def send(self, signum: signal.Signals, rank: int | None, when: str) -> None:
        """Send a signal to a rank, or to the launcher if `rank` is None, when all ranks have reached `when`."""
        ready = [self.folder / f"{when}{r}" for r in range(2)]
        until = time.monotonic() + START
        while not all(map(Path.exists, ready)):
            assert self.launched.poll() is None, (self.folder / "said").read_text()
            assert time.monotonic() < until, "the ranks do not come"
            time.sleep(0.02)
        pid = self.launched.pid if rank is None else int((self.folder / f"started{rank}").read_text())
        os.kill(pid, signum)

    def end(self, but: int | None = None) -> tuple[int | None, str]:
        """Wait until all processes have ended, and return the exit status of the launcher and the output.

        Args:
            but: a stopped rank, which may remain.
        """
        until = time.monotonic() + scale_timeout(SOON)
        stays = "-1" if but is None else (self.folder / f"started{but}").read_text()
        while any(str(pid) != stays for pid in find_processes(self.token)):
            assert time.monotonic() < until, "processes are left"
            self.launched.poll()
            time.sleep(0.05)
        return self.launched.wait(scale_timeout(15)), (self.folder / "said").read_text()


@contextmanager
def script(folder: Path, *launcher: str, stops: str = "") -> Iterator[Script]:
    """Launch the training script, and kill all its processes at the end of the block.

    Args:
        folder: the working directory.
        launcher: arguments of the interpreter that precede the script.
        stops: the value of the environment variable `STOPS`.
    """
    token = secrets.token_hex(8)
    env = {**os.environ, **environment(token), STOPS: stops}
    with open(folder / "said", "w") as said:
        command = [sys.executable, *launcher, SCRIPT, "1000000"]
        started = subprocess.Popen(command, cwd=folder, env=env, stdout=said, stderr=said, text=True)
    try:
        yield Script(started, folder, token)
    finally:
        for pid in find_processes(token):
            os.kill(pid, signal.SIGKILL)
        started.wait()


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2")


def test_rank_that_can_not_host_the_store_ends_with_all_that_it_has_started(tmp_path, monkeypatch):
    """If the port of the store is in use, rank 0 ends with an error, together with all processes that it started."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setenv("MASTER_PORT", str(other.getsockname()[1]))
        with script(tmp_path) as run:
            run.launched.wait(START)
            status, said = run.end()
    assert status == 1
    assert "rank 0 can't host the store of this run at 127.0.0.1" in said


@pytest.mark.slow
def test_failing_rank_ends_although_a_stopped_rank_does_not_answer(tmp_path):
    """A rank ends although it waits in a collective call for a stopped rank, which it declares dead."""
    with script(tmp_path, stops="training1") as run:
        run.send(signal.SIGSTOP, 1, "training")
        status, said = run.end(but=1)
    assert status == 1
    assert f"rank 1 (stage 0) was declared dead by rank 0: no heartbeat for {HEARTBEAT_TIMEOUT:.0f} s" in said
    assert "Traceback" not in said  # only the failed rank would print one


def test_rank_that_is_stopped_before_ranks_are_connected_is_not_awaited(tmp_path):
    """A rank that was stopped before it connected is detected by its process state, as it has sent no heartbeat yet."""
    with script(tmp_path, stops="started1") as run:
        run.send(signal.SIGSTOP, 1, "started")
        status, said = run.end(but=1)
    assert status == 1
    assert re.search(
        r"RankStoppedError: (local )?rank 1, process \d+, has been stopped for \d+ s, and others wait", said
    )


@pytest.mark.slow  # tests/faults/test_errors.py tests the same with ranks
def test_sigterm_is_not_a_success(tmp_path):
    """After SIGTERM, the launcher has the exit status 143, and a complete checkpoint was saved."""
    with script(tmp_path) as run:
        run.send(signal.SIGTERM, 0, "training")
        status, said = run.end()
    assert status == 128 + signal.SIGTERM
    assert "All ranks end after SIGTERM, at global step" in said
    assert len(torch.load(tmp_path / "left.ckpt", weights_only=False)["state_dict"]) == 8


@pytest.mark.slow
def test_ctrl_c_is_not_the_death_of_a_rank(tmp_path):
    """Ctrl-C ends the run with KeyboardInterrupt, and no rank is reported as killed.

    A terminal sends the signal to all processes, and Lightning then kills the ranks that it has started.
    """
    with script(tmp_path, stops="training1") as run:  # the other rank takes long to end
        run.send(signal.SIGINT, 0, "training")
        status, said = run.end()
    assert status == 1
    assert "KeyboardInterrupt" in said
    assert "was ended by signal" not in said


@pytest.mark.slow
@pytest.mark.parametrize("when", ["started", "training"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_under_lightnings_launcher(victim, when, tmp_path):
    """If a rank is killed, the other rank ends and names it, both before and after the ranks have connected."""
    with script(tmp_path) as run:
        run.send(signal.SIGKILL, victim, when)
        status, said = run.end()
    assert status == (1 if victim else -signal.SIGKILL)
    named = {
        0: ("rank 0, which hosts the store of this run, has ended", "which has started this one, has ended"),
        1: ("rank 1 was ended by signal 9 before it connected", "rank 1 (stage 0) has ended", "rank 1 has ended"),
    }
    assert any(name in said for name in named[victim])


@pytest.mark.slow
@pytest.mark.parametrize("when", ["started", "training"])
def test_a_death_of_torchruns_agent(when, tmp_path):
    """If the agent of torchrun is killed, the ranks end with an error that names the launcher."""
    with script(tmp_path, *TORCHRUN) as run:
        run.send(signal.SIGKILL, None, when)
        _, said = run.end()
    named = (
        "has started this one, has ended",
        "the launcher, which hosts the store",
        "the launcher has ended: it hosted",
    )
    assert any(name in said for name in named)


@pytest.mark.slow
def test_a_terminated_rank_is_a_failure_for_torchrun(tmp_path):
    with script(tmp_path, *TORCHRUN) as run:
        run.send(signal.SIGTERM, 1, "training")
        status, said = run.end()
    assert status == 1
    assert "exitcode  : 143" in said
    assert (tmp_path / "left.ckpt").exists()


def test_process_started_by_a_rank_is_not_a_rank(monkeypatch):
    """A process that a rank has started is not treated as a rank, although it inherits the environment of the rank."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv(launcher.LAUNCHER_VARIABLE, str(os.getpid()))
    code = "from lightning_pipes.engine.watch.launcher import _launcher; import os; print(_launcher() == os.getppid())"
    below = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    for program, ours in ((code, "True\n"), (below, "False\n")):
        found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert found.stdout == ours


TRAINS = """
import os

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from tests.trainer.lit import Lit, data

before = set(os.environ)
for _ in range(2):
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=PipelineStrategy(microbatches=2), max_steps=1, precision="64-true",
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Lit(), DataLoader(data(), batch_size=8))
if trainer.is_global_zero:
    print("left", sorted(name for name in set(os.environ) - before if name.startswith("LIGHTNING_PIPES")))
"""


def test_nothing_of_ours_stays_in_the_environment(tmp_path):
    """Secret and launcher are removed from the environment, because later child processes would inherit them."""
    (tmp_path / "trains.py").write_text(TRAINS)
    env = {**os.environ, **environment(secrets.token_hex(8))}
    found = subprocess.run(
        [sys.executable, "trains.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=START
    )
    assert found.returncode == 0, found.stderr
    assert "left []" in found.stdout


UNGUARDED = """
from torch.utils.data import DataLoader
import lightning.pytorch as pl
from lightning_pipes import PipelineStrategy
from tests.trainer.lit import Lit, data

trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy=PipelineStrategy(microbatches=2), max_steps=1, precision="64-true",
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Lit(), DataLoader(data(), batch_size=8, num_workers=1, multiprocessing_context="spawn"))
"""


def test_a_script_without_a_main_guard_is_named_where_loader_workers_import_it(tmp_path):
    """If spawned loader workers import a script without a main guard, the error explains how to add one."""
    (tmp_path / "trains.py").write_text(UNGUARDED)
    env = {**os.environ, **environment(secrets.token_hex(8))}
    found = subprocess.run(
        [sys.executable, "trains.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=START
    )
    assert found.returncode != 0
    assert (
        "PlanError: this process is a worker, as of a DataLoader with multiprocessing_context='spawn'" in found.stderr
    )
    assert 'below `if __name__ == "__main__":`' in found.stderr
    assert "MASTER_PORT" not in found.stderr
