"""The ports of a run on one host: other hosts cannot reach them, and other users of this host cannot misuse them."""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from benchmarks.harness import namespaces
from lightning_pipes.testing.ranks import find_processes, run_ranks, wait_until
from tests.launch.example import environment

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(bool(namespaces.unavailable_reason()), reason=namespaces.unavailable_reason()),
]
NOBODY = 65534
SCRIPT = str(Path(__file__).with_name("doors.py"))
NOTICE = "1/failure' into its store"
"""The end of the warning about a forged failure."""
RAW = "\x1b[2Jplanted"
"""The text of a forged failure, which would clear a terminal."""
ANYWHERE = (0, 1)  # 0.0.0.0 and ::, as numbers of /proc/net


class Evil:
    """An object that runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return open, (str(self._path), "w")


def listening(pid: int) -> Iterator[tuple[bool, int]]:
    """Yield, for each TCP socket on which a process listens, whether other hosts may connect to it, and its port."""
    mine = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                host, port = fields[1].split(":")
                yield host not in ("0100007F", "00000000000000000000000001000000"), int(port, 16)


def doors(token: str) -> tuple[dict[int, bool], Mapping[str, str]]:
    """Return whether other hosts may connect to each port of the run's processes, and the environment of rank 1."""
    ports, env = dict[int, bool](), dict[str, str]()
    for pid, found in find_processes(token).items():
        ports.update((port, outside) for outside, port in listening(pid))
        env = found if found.get("LOCAL_RANK") == "1" else env
    return ports, env


def connects(host: str, port: int) -> bool:
    """Return whether a connection to the port succeeds."""
    with suppress(OSError), socket.create_connection((host, port), 2.0):
        return True
    return False


def reached(rank: int, holder: int, ports: list[int]) -> list[int]:
    """Return the ports that another host reaches."""
    namespaces.enter(holder)
    return [port for port in ports if connects(namespaces.host_address(0), port)]


def plant(rank: int, holder: int, stores: list[int], payload: bytes) -> list[str]:
    """Write into all stores as another user of the host, to every key that is read as bytes, and return the keys."""
    namespaces.enter(holder)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    planted = []
    for port in stores:
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=10))
        keys = store.list_keys()
        runs = {key.removesuffix("heart/0") for key in keys if key.endswith("lightning_pipes/heart/0")}
        values = {f"{run}1/failure": RAW for run in runs}
        for run in runs:
            for part in range(1, 5):
                values.update({f"{run}1/{part}/news/{n}": payload for n in range(1, 9)})
                store.add(f"{run}1/{part}/news/news", 8)
                store.add(f"{run}1/{part}/news", 8)
        boards = [key.partition("boards/1/")[0] for key in keys if "boards/1/" in key]
        for board in boards:
            values.update({f"{board}boards/1/next/{n}": payload for n in range(2, 9)})
            values.update({f"{board}boards/1/end": payload})
        for key, value in values.items():
            store.set(key, value)
        planted += values
    return planted


@pytest.mark.parametrize("what", ["study", pytest.param("fit", marks=pytest.mark.slow)])
def test_a_run_on_one_host(what: str, tmp_path: Path) -> None:
    """Forged values run no code and end no process, and the log mentions them without control characters."""
    token, ran = secrets.token_hex(8), tmp_path / "ran"
    command = ["env", "-u", "GLOO_SOCKET_IFNAME", sys.executable, SCRIPT, what, str(tmp_path)]
    with namespaces.Hosts(2) as hosts:
        output = tmp_path / "output"
        with output.open("w") as written:
            run = hosts.start(0, command, environment(token), stdout=written, stderr=subprocess.STDOUT)
        assert wait_until(lambda: all((tmp_path / f"trains{rank}").exists() for rank in range(2)), 300)
        ports, env = doors(token)
        assert ports
        assert run_ranks(reached, 1, hosts.holders[1], sorted(ports)) == [[]]
        assert [port for port, outside in ports.items() if outside] == []
        stores = [int(env["MASTER_PORT"])]
        if "LIGHTNING_PIPES_BOARD" in env:
            stores.append(int(env["LIGHTNING_PIPES_BOARD"].rpartition(":")[2]))
        (planted,) = run_ranks(plant, 1, hosts.holders[0], stores, pickle.dumps(Evil(ran)))
        assert len(planted) > (10 if what == "study" else 5)
        assert wait_until(lambda: NOTICE in output.read_text() or run.poll() is not None, 300)
        (tmp_path / "planted").touch()
        run.wait(300)
    said = output.read_text()
    assert run.returncode == 0, said
    assert said.count("came to its end") == 2
    assert not ran.exists()
    assert "\x1b" not in said
    assert "a process outside this run wrote" in said
    assert NOTICE in said
