"""The name of a run is chosen by its own processes, not by other users of this host or other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from benchmarks.harness import namespaces
from lightning_pipes.engine.watch.trust import SECRET_VARIABLE, SignedStore, seal_from_environment
from lightning_pipes.ir import PipelineError
from lightning_pipes.tune.run_name import run_name

ROOT = Path(__file__).parents[2]
KEY = "lightning_pipes/run_name"
TIME = re.compile(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d")
PLANTED = ("../../planted", "2020-01-01/00-00-00")

RANK = f"""
import os, sys, time
from datetime import timedelta
sys.path.insert(0, {str(ROOT)!r})
from lightning_pipes.engine.watch.rendezvous import launcher_store
from lightning_pipes.tune.run_name import run_name

store = launcher_store(timedelta(seconds=60))
store.wait(["planted"])
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("named", run_name(), flush=True)
store.add("named" + attempt, 1)
while store.add("named" + attempt, 0) < 2:
    time.sleep(0.02)
sys.exit(attempt == "0")  # torchrun starts both again
"""
STRANGER = f"""
import os, time
from datetime import timedelta
from torch.distributed import TCPStore

os.setuid(65534)
for _ in range(1000):
    try:
        host, port = {namespaces.host_address(0)!r}, {namespaces.PORT}
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=1))
        break
    except RuntimeError:
        time.sleep(0.1)
while True:
    for planted in {PLANTED!r}:
        store.set({KEY!r}, planted)
        store.set("planted", "")
        time.sleep(0.005)
"""


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.skipif(bool(namespaces.unavailable_reason()), reason=namespaces.unavailable_reason())
def test_another_user_of_another_host_does_not_name_a_run(tmp_path: Path) -> None:
    """A run keeps its own name over a restart although another user writes names into the store all the time."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    torchrun += [f"--master-addr={namespaces.host_address(0)}", f"--master-port={namespaces.PORT}", str(script)]
    with namespaces.Hosts(2) as hosts:
        hosts.start(1, [sys.executable, "-c", STRANGER], {})
        env = {SECRET_VARIABLE: "", "OMP_NUM_THREADS": "1"}
        run = hosts.start(0, torchrun, env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said, _ = run.communicate(timeout=240)
    names = re.findall("^named (.*)$", said, re.MULTILINE)
    assert len(names) == 4, said  # two ranks, started twice
    assert len(set(names)) == 1, said
    assert TIME.fullmatch(names[0])
    assert names[0] not in PLANTED


@pytest.fixture
def store() -> TCPStore:
    """A store that any process can write to."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch, store: TCPStore, tmp_path: Path) -> pytest.MonkeyPatch:
    """The environment of one of two processes that torchrun has started on one host."""
    for name in [name for name in os.environ if name.startswith(("TORCHELASTIC", "SLURM")) or name == SECRET_VARIABLE]:
        monkeypatch.delenv(name)
    run = tmp_path / "torchelastic_x" / "none_y"
    (run / "attempt_0" / "1").mkdir(parents=True)
    run.chmod(0o700)
    for name, value in {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(run / "attempt_0" / "1" / "error.json"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_processes_of_one_host_keep_the_name_to_themselves(torchrun: pytest.MonkeyPatch, store: TCPStore) -> None:
    """On one host, the name is stored in a file in the private log folder of torchrun, and forged names are ignored."""
    store.set(KEY, PLANTED[1])
    folder = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[2]
    first = run_name()
    assert TIME.fullmatch(first)
    assert first not in PLANTED
    assert [path.read_text() for path in folder.iterdir() if path.is_file()] == [first]
    store.set(KEY, "")
    assert run_name() == first
    assert store.get(KEY).decode() == first  # a host that joins later reads it here
    # the name of another start
    next(path for path in folder.iterdir() if path.is_file()).write_text("2026-03-01/14-05-09")
    torchrun.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "attempt_1" / "0" / "error.json"))
    assert run_name() == "2026-03-01/14-05-09"
    torchrun.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert run_name() == "torchrun-none"


def test_a_folder_that_others_may_write_to_keeps_no_name(torchrun: pytest.MonkeyPatch) -> None:
    """If other users may write to the log folder, or it does not exist, an error asks for a secret."""
    folder = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[2]
    folder.chmod(0o777)
    with pytest.raises(PipelineError, match="set LIGHTNING_PIPES_SECRET"):
        run_name()
    torchrun.setenv("TORCHELASTIC_ERROR_FILE", "")  # as with --log-dir=/dev/null
    with pytest.raises(PipelineError, match="set LIGHTNING_PIPES_SECRET"):
        run_name()


def test_without_such_a_folder_a_secret_keeps_the_name_in_the_store(
    torchrun: pytest.MonkeyPatch, store: TCPStore
) -> None:
    """Without a log folder, the name is stored signed in the store, and names with a wrong signature are ignored."""
    torchrun.setenv("TORCHELASTIC_ERROR_FILE", "")
    torchrun.setenv(SECRET_VARIABLE, "long and random")
    seal = seal_from_environment()
    assert seal is not None
    for planted in (*PLANTED, seal.sign(b"../planted", KEY)):  # an overwritten value is not accepted either
        store.set(KEY, planted)
        first = run_name()
        assert TIME.fullmatch(first)
        assert first not in PLANTED
        assert first.encode() != store.get(KEY)
        assert run_name() == first


def test_several_hosts_agree_and_each_remembers(torchrun: pytest.MonkeyPatch, store: TCPStore) -> None:
    """With a secret, a host reads the signed name of another host, and keeps it if the store is overwritten."""
    torchrun.setenv("WORLD_SIZE", "4")
    torchrun.setenv(SECRET_VARIABLE, "long and random")
    SignedStore(store, seal_from_environment()).set(KEY, "2026-03-01/14-05-09")  # the name from another host
    assert run_name() == "2026-03-01/14-05-09"
    store.set(KEY, PLANTED[1])
    assert run_name() == "2026-03-01/14-05-09"


def test_hosts_without_a_secret_take_the_form_of_a_name_only(
    torchrun: pytest.MonkeyPatch, store: TCPStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a secret, several hosts accept only values that have the form of a name, and log a warning."""
    torchrun.setenv("WORLD_SIZE", "4")
    torchrun.setenv("TORCHELASTIC_ERROR_FILE", "")
    for planted in ("../../planted", "/planted", "2026-03-01/14-05-09/..", "2026-03-01/14-05-0\u0669", b"\xff"):
        store.set(KEY, planted)
        first = run_name()
        assert TIME.fullmatch(first)
        assert run_name() == first
    assert "Set LIGHTNING_PIPES_SECRET" in caplog.text
