"""Hosts as network namespaces of this machine: separate addresses, and links that can be cut. Needs root on Linux.

The namespaces have no names. A process holds each of them, and the kernel kills it with its owner. So they vanish with
their creator, however that ends.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from lightning_pipes.testing.ranks import RankResult, die_with_parent, returned_values, watch_ranks

DEVICE = "eth0"
"""The network device of each host; GLOO_SOCKET_IFNAME names it for gloo."""
PORT = 29500
"""The port of the store on the first host."""
_CLONE_NEWNET = 0x40000000
_OWNER = "LIGHTNING_PIPES_HOSTS_OWNER"
"""The environment variable that names the owner of a host's processes."""


def host_address(host: int) -> str:
    """Return the address of a host in its network."""
    return f"10.77.0.{host + 1}"


def enter(holder: int) -> None:
    """Move the calling thread and its children into the namespace of the process `holder`.

    Raises:
        OSError: not allowed, or no such process.
    """
    descriptor = os.open(f"/proc/{holder}/ns/net", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"can't enter the network namespace of process {holder}")
    finally:
        os.close(descriptor)


def cut() -> None:
    """Take down the link of the caller's host."""
    run_command("ip", "link", "set", DEVICE, "down")


class Hosts:
    """`n` hosts on one switch, while the context is open. Opened and used from one thread: the hosts end with it.

    Attributes:
        holders: for each host a process in it, to `enter` by.
    """

    def __init__(self, n: int) -> None:
        self.holders: list[int] = []
        self._n = n
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._set_up()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, host: int, command: Sequence[str], env: Mapping[str, str], **more: Any) -> subprocess.Popen[str]:
        """Start a process on a host; it is killed when the context ends."""
        inside = [*_nsenter(self.holders[host]), *command]
        return self._popen(inside, {"GLOO_SOCKET_IFNAME": DEVICE, **env}, **more)

    def cut(self, host: int) -> None:
        """Take down the link of a host."""
        self._run_inside(self.holders[host], "ip", "link", "set", DEVICE, "down")

    def run_ranks(
        self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, env: Mapping[str, str] | None = None
    ) -> list[Any]:
        """Run `ranks.run_ranks` with one rank on each host."""
        return returned_values(self.watch_ranks(fn, *args, timeout=timeout, env=env))

    def watch_ranks(
        self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, env: Mapping[str, str] | None = None
    ) -> list[RankResult]:
        """Run `ranks.watch_ranks` with one rank on each host; the first host has their store."""
        meeting = {
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "MASTER_ADDR": host_address(0),
            "MASTER_PORT": str(PORT),
            "LOCAL_WORLD_SIZE": "1",
            "GLOO_SOCKET_IFNAME": DEVICE,
            **(env or {}),
        }
        return watch_ranks(_on_host, self._n, self.holders, fn, *args, timeout=timeout, env=meeting)

    def _set_up(self) -> None:
        switch = self._start_holder()
        self._run_inside(switch, "ip", "link", "add", "switch", "type", "bridge")
        self._run_inside(switch, "ip", "link", "set", "switch", "up")
        for host in range(self._n):
            holder, port = self._start_holder(), f"port{host}"
            peer = ("peer", "name", DEVICE, "netns", str(holder))
            self._run_inside(switch, "ip", "link", "add", port, "type", "veth", *peer)
            self._run_inside(switch, "ip", "link", "set", port, "master", "switch", "up")
            self._run_inside(holder, "ip", "address", "add", f"{host_address(host)}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                self._run_inside(holder, "ip", "link", "set", device, "up")
            self.holders.append(holder)

    def _start_holder(self) -> int:
        process = self._popen(["unshare", "--net", "sh", "-c", "echo; exec sleep infinity"], {}, stdout=subprocess.PIPE)
        assert process.stdout is not None
        if not process.stdout.readline():
            raise PermissionError("network namespaces can't be made here: root and Linux are needed")
        process.stdout.close()
        return process.pid

    def _popen(self, command: Sequence[str], env: Mapping[str, str], **more: Any) -> subprocess.Popen[str]:
        everything = {**os.environ, _OWNER: f"{os.getpid()} {_start_time(os.getpid())}", **env}
        # Tied to us before Popen returns: setpriv might run after our end.
        process = subprocess.Popen(command, env=everything, text=True, preexec_fn=die_with_parent, **more)
        self._stack.callback(_end, process)
        return process

    def _run_inside(self, holder: int, *command: str) -> None:
        run_command(*_nsenter(holder), *command)


@lru_cache(maxsize=1)
def unavailable_reason() -> str:
    """Return why hosts can't be created here; empty if they can."""
    if sys.platform != "linux":
        return "hosts need the network namespaces of Linux"
    if missing := [tool for tool in ("ip", "nsenter", "unshare") if not shutil.which(tool)]:
        return f"hosts need what is not installed here: {', '.join(missing)}"
    try:
        with Hosts(2):
            return ""
    except OSError as error:
        return str(error)


def kill_orphans() -> list[int]:
    """Kill all processes in hosts with dead owners, and return their numbers. The kernel kills them itself, unless the
    owner was killed while it started one."""
    numbers = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    left = [pid for pid in numbers if _start_time(pid) and _is_orphan(pid)]
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def run_command(*command: str) -> None:
    """Run a command to its end.

    Raises:
        OSError: it failed; with its output.
    """
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")


def _on_host(rank: int, holders: Sequence[int], fn: Callable[..., Any], *args: Any) -> Any:
    enter(holders[rank])
    return fn(rank, *args)


def _nsenter(holder: int) -> tuple[str, ...]:
    return "nsenter", "--target", str(holder), "--net"


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def _is_orphan(pid: int) -> bool:
    """Return whether the owner of the process's hosts has ended."""
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0"):
            name, _, owner = entry.partition("=")
            if name == _OWNER:
                owner_pid, _, born = owner.partition(" ")
                return _start_time(int(owner_pid)) != born
    return False


def _start_time(pid: int) -> str:
    """Return the start time of a process, which tells it from a later one of the same number; empty if it has ended."""
    with suppress(OSError):
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else rest[18]
    return ""
