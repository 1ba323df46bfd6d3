"""Hosts that are network namespaces of this machine: separate addresses, links that can be cut. Needs root on Linux.

The namespaces have no names and are held by a process each, which the kernel kills with its owner; so they vanish with
whoever made them, however that ends.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

from lightning_pipes.testing.ranks import die_with_parent

DEVICE = "eth0"
"""The network device of each host; gloo has to be told by GLOO_SOCKET_IFNAME."""
_CLONE_NEWNET = 0x40000000
_TIED = ("setpriv", "--pdeathsig", "KILL")


def address(host: int) -> str:
    """The address of a host in its network."""
    return f"10.77.0.{host + 1}"


def enter(holder: int) -> None:
    """Moves the calling thread, and those that it starts, into the namespace that the process `holder` is in.

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
    """Takes down the link of the host that the caller is in."""
    _run("ip", "link", "set", DEVICE, "down")


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
            switch = self._hold()
            self._in(switch, "ip", "link", "add", "switch", "type", "bridge")
            self._in(switch, "ip", "link", "set", "switch", "up")
            for host in range(self._n):
                holder, port = self._hold(), f"port{host}"
                peer = ("peer", "name", DEVICE, "netns", str(holder))
                self._in(switch, "ip", "link", "add", port, "type", "veth", *peer)
                self._in(switch, "ip", "link", "set", port, "master", "switch", "up")
                self._in(holder, "ip", "address", "add", f"{address(host)}/24", "dev", DEVICE)
                for device in ("lo", DEVICE):
                    self._in(holder, "ip", "link", "set", device, "up")
                self.holders.append(holder)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, host: int, command: Sequence[str], env: Mapping[str, str], **more: Any) -> subprocess.Popen[str]:
        """Starts a process on a host; it is killed, if it is still there, when the context ends."""
        inside = [*_nsenter(self.holders[host]), *command]
        everything = {**os.environ, "GLOO_SOCKET_IFNAME": DEVICE, **env}
        # Tied to us before Popen returns: setpriv might come to it when we are gone already.
        process = subprocess.Popen(inside, env=everything, text=True, preexec_fn=die_with_parent, **more)
        self._stack.callback(_end, process)
        return process

    def _hold(self) -> int:
        process = subprocess.Popen(
            [*_TIED, "unshare", "--net", "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE, text=True
        )
        self._stack.callback(_end, process)
        assert process.stdout is not None
        if not process.stdout.readline():
            raise PermissionError("network namespaces can't be made here: root and Linux are needed")
        process.stdout.close()
        return process.pid

    def _in(self, holder: int, *command: str) -> None:
        _run(*_nsenter(holder), *command)


def available() -> bool:
    """Whether hosts can be made here."""
    if sys.platform != "linux" or not all(map(shutil.which, ("ip", "nsenter", "unshare", "setpriv"))):
        return False
    try:
        with Hosts(2):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def _nsenter(holder: int) -> tuple[str, ...]:
    return "nsenter", "--target", str(holder), "--net"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
