"""The example with torchrun on one host and on two hosts, also if a process is killed."""

from __future__ import annotations

import csv
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from benchmarks.harness import namespaces
from lightning_pipes.testing.ranks import find_processes, scale_timeout
from tests.launch.example import EPOCHS, SCRIPT, SETTINGS, environment, run_in_ranks, wait_until

Start = Callable[[int, list[str], dict[str, str], Path], "subprocess.Popen[str]"]
"""A function that starts a command on one of the hosts, in a directory."""


@dataclass(frozen=True)
class Training:
    """The results of a run of torchrun, read from its run directory."""

    directory: Path
    said: str

    @property
    def attempts(self) -> int:
        return len([*self.directory.rglob("metrics.csv")])

    def validation(self) -> list[tuple[int, str]]:
        """Return the step and the validation loss of every epoch, without rounding.

        If an epoch ran twice, the later values are returned.
        """
        found = {}
        for path in sorted(self.directory.rglob("metrics.csv"), key=lambda p: p.stat().st_mtime):
            with open(path) as file:
                found.update({int(row["step"]): row["val_loss"] for row in csv.DictReader(file) if row["val_loss"]})
        return sorted(found.items())

    def weights(self) -> dict[str, torch.Tensor]:
        state = torch.load(self.directory / "checkpoints" / "last.ckpt", weights_only=False)["state_dict"]
        return dict(state)


def here(host: int, command: list[str], env: dict[str, str], cwd: Path) -> subprocess.Popen[str]:
    """Start a command on this host."""
    return subprocess.Popen(command, env={**os.environ, **env}, cwd=cwd, text=True, stdout=-1, stderr=-2)


def torchrun(
    folder: Path,
    options: list[str],
    hosts: int = 1,
    start: Start = here,
    kill: int | None = None,
    lost: int | None = None,
    settings: Sequence[str] = SETTINGS,
) -> Training:
    """Train on `hosts` hosts that share a file system, and return the results.

    When a checkpoint exists, global rank `kill` or all processes of host `lost` are killed.
    """
    token = secrets.token_hex(8)
    env = environment(token)
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    agents = []
    for host in range(hosts):
        where = [f"--node-rank={host}"] if hosts > 1 else []
        agents.append(start(host, [*command, *where, SCRIPT, *settings], env, folder))
    if kill is not None:
        wait_until(lambda: [*folder.rglob("last.ckpt")], agents)
        (pid,) = [pid for pid, ours in find_processes(token).items() if ours.get("RANK") == str(kill)]
        os.kill(pid, signal.SIGKILL)
    if lost is not None:
        wait_until(lambda: [*folder.rglob("last.ckpt")], agents)
        gone = agents.pop(lost)
        gone.kill()
        for pid, ours in find_processes(token).items():
            if ours.get("GROUP_RANK") == str(lost):
                os.kill(pid, signal.SIGKILL)
        gone.communicate()
    with ThreadPoolExecutor(len(agents)) as pool:
        said = list(pool.map(lambda agent: agent.communicate(timeout=scale_timeout(120))[0], agents))
    assert {agent.returncode for agent in agents} == {0}, "\n".join(said)
    assert not find_processes(token), "processes were left behind"
    (directory,) = {path.parent.parent for path in folder.glob("outputs/**/last.ckpt")}
    assert len([*folder.glob("outputs/*/*")]) == 1
    return Training(directory, "".join(said))


def check_same(found: Training, wanted: Training) -> None:
    """Check that the validation losses and weights of two trainings are equal bit by bit."""
    assert len(found.validation()) == EPOCHS
    assert found.validation() == wanted.validation()
    weights = found.weights()
    assert all(torch.equal(weights[name], value) for name, value in wanted.weights().items())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Training:
    return torchrun(tmp_path_factory.mktemp("undisturbed"), ["--nproc-per-node=2"])


def test_the_result_of_one_process(undisturbed, tmp_path):
    """One stage in one process gives the same validation losses as two ranks, up to rounding."""
    found = run_in_ranks("train.py", tmp_path, *SETTINGS, "trainer.devices=1", ranks=1)
    assert found.returncode == 0, found.stdout + found.stderr
    (last,) = tmp_path.glob("outputs/**/last.ckpt")
    check_near(Training(last.parent.parent, ""), undisturbed)
    assert undisturbed.attempts == 1


def check_near(found: Training, wanted: Training) -> None:
    """Check that validation losses are equal up to rounding, as the order of sums depends on the number of stages."""
    one, two = ([(s, float(v)) for s, v in t.validation()] for t in (found, wanted))
    assert len(one) == EPOCHS
    torch.testing.assert_close(torch.tensor(one), torch.tensor(two), rtol=1e-3, atol=0)


@pytest.mark.parametrize("rendezvous", ["c10d", pytest.param("static", marks=pytest.mark.slow)])
def test_restart_continues_where_the_dead_run_ended(rendezvous, undisturbed, tmp_path):
    """After a rank was killed, torchrun restarts the training, which gives the same results bit by bit."""
    options = []  # the default of torchrun on one host is c10d
    if rendezvous == "static":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            options = ["--rdzv-backend=static", "--master-addr=127.0.0.1", f"--master-port={free.getsockname()[1]}"]
    restarted = torchrun(tmp_path, ["--nproc-per-node=2", "--max-restarts=1", *options], kill=1)
    assert restarted.attempts == 2
    check_same(restarted, undisturbed)


@pytest.mark.slow
def test_fewer_stages_continue_if_a_host_is_gone(undisturbed, tmp_path):
    """An elastic run loses a host and continues with two stages on one host instead of four on two, up to rounding."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"--rdzv-endpoint=127.0.0.1:{free.getsockname()[1]}"
    # Agents that start slowly must meet, and an agent that is alive must not miss all its signs of life.
    soon = "last_call_timeout=30,keep_alive_interval=1,keep_alive_max_attempt=30"

    def start(host: int, command: list[str], env: dict[str, str], cwd: Path) -> subprocess.Popen[str]:
        first = {"PET_RDZV_CONF": f"is_host={int(host == 0)},{soon}"}
        return here(host, [each for each in command if not each.startswith("--node-rank")], {**env, **first}, cwd)

    options = ["--nnodes=1:2", "--nproc-per-node=2", "--rdzv-backend=c10d", endpoint, "--max-restarts=2"]
    settings = [*SETTINGS, "trainer.num_nodes=${oc.env:GROUP_WORLD_SIZE}"]
    found = torchrun(tmp_path, options, hosts=2, start=start, lost=1, settings=settings)
    assert found.attempts == 2
    check_near(found, undisturbed)


needs_hosts = pytest.mark.skipif(bool(namespaces.unavailable_reason()), reason=namespaces.unavailable_reason())


def on_two_hosts(folder: Path, options: list[str], kill: int | None = None) -> Training:
    """Run torchrun on two emulated hosts."""
    with namespaces.Hosts(2) as hosts:

        def start(host: int, command: list[str], env: dict[str, str], cwd: Path) -> subprocess.Popen[str]:
            # as with --local-addr and --rdzv-conf, because these hosts have the same name
            own = {"PET_LOCAL_ADDR": namespaces.host_address(host), "PET_RDZV_CONF": f"is_host={int(host == 0)}"}
            return hosts.start(host, command, {**env, **own}, cwd=cwd, stdout=-1, stderr=-2)

        return torchrun(folder, ["--nnodes=2", *options], hosts=2, start=start, kill=kill)


ENDPOINT = f"{namespaces.host_address(0)}:29500"


@pytest.mark.slow
@pytest.mark.root
@needs_hosts
@pytest.mark.parametrize("victim", [0, 1])
def test_two_hosts_that_find_each_other(victim, undisturbed, tmp_path):
    """A run on two hosts gives the same results after a rank was killed.

    With the c10d rendezvous, each host counts restarts separately, and ranks may change hosts.
    """
    options = ["--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={ENDPOINT}", "--max-restarts=2"]
    found = on_two_hosts(tmp_path, options, victim)
    assert found.attempts == 2
    check_same(found, undisturbed)


@pytest.mark.root
@pytest.mark.slow
@needs_hosts
def test_two_hosts_with_two_processes_each(undisturbed, tmp_path):
    """Four ranks on two hosts give the validation loss of two ranks on one host, to three decimals."""
    master = ["--master-addr", namespaces.host_address(0), "--master-port=29500"]
    found = on_two_hosts(tmp_path, ["--nproc-per-node=2", "--rdzv-backend=static", *master])
    assert f"val_loss={float(undisturbed.validation()[-1][1]):.3f}" in found.said
