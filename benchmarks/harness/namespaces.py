"""Emulated hosts, each a network namespace of this machine: separate addresses, and links that can be cut.

This module needs root on Linux. The namespaces have no names. Each one is held by a process, which the kernel kills
when its owner ends. The namespaces therefore disappear together with the process that created them, no matter how that
process ends.
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
"""The network device of each host. GLOO_SOCKET_IFNAME is set to this name so that gloo uses it."""
PORT = 29500
"""The port of the store on the first host."""
_CLONE_NEWNET = 0x40000000
_OWNER = "LIGHTNING_PIPES_HOSTS_OWNER"
"""The environment variable that identifies the owner of a host's processes."""


def host_address(host: int) -> str:
    """Return the address of a host in the network of the hosts."""
    return f"10.77.0.{host + 1}"


def enter(holder: int) -> None:
    """Move the calling thread and its future children into the network namespace of a process.

    Args:
        holder: the ID of the process.

    Raises:
        OSError: the process does not exist, or the caller lacks the permission.
    """
    descriptor = os.open(f"/proc/{holder}/ns/net", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"can't enter the network namespace of process {holder}")
    finally:
        os.close(descriptor)


def cut() -> None:
    """Take down the link of the host that the caller runs on."""
    run_command("ip", "link", "set", DEVICE, "down")


class Hosts:
    """`n` hosts on one switch, which exist while the context is open.

    The context must be opened and used from one thread, because the hosts end together with this thread.

    Attributes:
        holders: for each host, the ID of a process in its namespace. Other threads and processes `enter` the host by
            it.
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
        """Start a process on a host. The process is killed when the context ends.

        Args:
            host: the number of the host.
            command: the command and its arguments.
            env: environment variables in addition to the caller's.
            **more: other arguments of `subprocess.Popen`.
        """
        inside = [*_nsenter(self.holders[host]), *command]
        return self._popen(inside, {"GLOO_SOCKET_IFNAME": DEVICE, **env}, **more)

    def cut(self, host: int) -> None:
        """Take down the link of a host."""
        self._run_inside(self.holders[host], "ip", "link", "set", DEVICE, "down")

    def run_ranks(
        self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, env: Mapping[str, str] | None = None
    ) -> list[Any]:
        """Call `lightning_pipes.testing.ranks.run_ranks` with one rank on each host."""
        return returned_values(self.watch_ranks(fn, *args, timeout=timeout, env=env))

    def watch_ranks(
        self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, env: Mapping[str, str] | None = None
    ) -> list[RankResult]:
        """Call `lightning_pipes.testing.ranks.watch_ranks` with one rank on each host.

        The store of the ranks is on the first host.
        """
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
            raise PermissionError("network namespaces can't be created here: root and Linux are needed")
        process.stdout.close()
        return process.pid

    def _popen(self, command: Sequence[str], env: Mapping[str, str], **more: Any) -> subprocess.Popen[str]:
        everything = {**os.environ, _OWNER: f"{os.getpid()} {_start_time(os.getpid())}", **env}
        # The child is tied to this process before Popen returns. This process might end before setpriv runs.
        process = subprocess.Popen(command, env=everything, text=True, preexec_fn=die_with_parent, **more)
        self._stack.callback(_end, process)
        return process

    def _run_inside(self, holder: int, *command: str) -> None:
        run_command(*_nsenter(holder), *command)


@lru_cache(maxsize=1)
def unavailable_reason() -> str:
    """Return the reason why hosts can't be created here, or an empty string if they can."""
    if sys.platform != "linux":
        return "hosts need the network namespaces of Linux"
    if missing := [tool for tool in ("ip", "nsenter", "unshare") if not shutil.which(tool)]:
        return f"hosts need tools that are not installed here: {', '.join(missing)}"
    try:
        with Hosts(2):
            return ""
    except OSError as error:
        return str(error)


def kill_orphans() -> list[int]:
    """Kill all processes on hosts whose owner has ended, and return their process IDs.

    The kernel normally kills these processes. They only remain if the owner was killed while it started one of them.
    """
    numbers = (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    left = [pid for pid in numbers if _start_time(pid) and _is_orphan(pid)]
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def run_command(*command: str) -> None:
    """Run a command and wait until it ends.

    Raises:
        OSError: the command failed. The message contains its output.
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
    """Return the start time of a process, or an empty string if it has ended.

    The start time distinguishes the process from a later one with the same ID.
    """
    with suppress(OSError):
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else rest[18]
    return ""
