"""Identifies a process among all processes that may share a directory, a store, or a database.

A host name and a process ID are not sufficient. Containers may share a host name and have separate process IDs, and
process IDs are reused.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import psutil

_FIRST_SPACE = "effffffc"
"""The inode number of the initial PID namespace of a Linux system, in hexadecimal."""


class Process(NamedTuple):
    """The identity of a process.

    Attributes:
        machine: a hash of the host name and, if it exists, the machine ID.
        boot: a hash of the boot ID, or empty if the system does not provide one.
        space: the PID namespace of `pid`, or empty if the system does not have namespaces.
        pid: the process ID.
        started: the start time of the process, in a unit of the system.
    """

    machine: str
    boot: str
    space: str
    pid: int
    started: int

    @classmethod
    def current(cls) -> Process:
        """Return the identity of this process."""
        return _process(os.getpid())

    @classmethod
    def from_pid(cls, pid: int) -> Process:
        """Return the identity of another process in this PID namespace.

        Raises:
            ProcessLookupError: the process does not exist.
        """
        started = _start_time(pid)
        if started is None:
            raise ProcessLookupError(f"there is no process {pid}")
        return cls(*_host_marks(), pid, started)

    @classmethod
    def parse(cls, text: str) -> Process | None:
        """Return the process with the text form `text`, or None if the text does not have the format of
        `str(process)`."""
        parts = text.split("-")
        if len(parts) != 5 or not all(part.isdigit() for part in parts[3:]):
            return None
        machine, boot, space, pid, started = parts
        return cls(machine, boot, space, int(pid), int(started))

    def __str__(self) -> str:
        """Return the attributes, joined by hyphens. The text consists of letters, digits and hyphens."""
        return "-".join(map(str, self))

    def has_ended(self) -> bool:
        """Return whether the process is known to have ended.

        The state of processes on other machines and in other containers is unknown, and the result is False for them. A
        process that was started before the last boot of this machine has ended.
        """
        machine, boot, space = _host_marks()
        if self.machine != machine or self.space != space:
            return False
        if self.boot != boot:
            return bool(self.boot and boot) and space == _FIRST_SPACE
        with suppress(PermissionError):  # the process of another user, about which the system gives no information
            return _start_time(self.pid) != self.started
        return False


def is_stopped(pid: int) -> bool:
    """Return whether a process of this PID namespace is stopped until it receives SIGCONT.

    On systems other than Linux, the result is always False.
    """
    with suppress(PermissionError):
        return _status(pid)[:1] == ["T"]  # a process that is stopped by a debugger has state "t"
    return False


def has_ended(pid: int) -> bool:
    """Return whether a process does not run in this PID namespace. Zombies count as ended.

    On systems other than Linux, the result is always True.
    """
    with suppress(PermissionError):
        return _status(pid)[:1] in ([], ["Z"], ["X"])
    return False


def read_boot_id() -> str:
    """Return the ID of the last boot of this machine, or an empty string if the system does not provide one.

    Containers on one machine have the same boot ID.
    """
    return _read("/proc/sys/kernel/random/boot_id")


def read_namespace(kind: str) -> str:
    """Return the inode number of a namespace of this process in hexadecimal, or an empty string without namespaces.

    Args:
        kind: the kind of the namespace, such as "pid", "net" or "time".
    """
    with suppress(OSError):
        return f"{os.stat(f'/proc/self/ns/{kind}').st_ino:x}"
    return ""


@cache
def _process(pid: int) -> Process:
    return Process.from_pid(pid)


@cache
def _host_marks() -> tuple[str, str, str]:
    """Return the attributes that all processes of this PID namespace share: `machine`, `boot` and `space`."""
    machine = _short(f"{socket.gethostname()}/{_read('/etc/machine-id')}")
    boot = read_boot_id()
    return machine, _short(boot) if boot else "", read_namespace("pid")


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _read(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text().strip()
    return ""


def _status(pid: int) -> list[str]:
    """Return the fields of a process in /proc/PID/stat, from its state on; empty if there is no such process.

    Raises:
        PermissionError: the system denies access.
    """
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def _start_time(pid: int) -> int | None:
    """Return the start time of a process, or None if it has ended or is a zombie.

    Raises:
        PermissionError: the system denies access.
    """
    if sys.platform == "linux":  # the times of psutil change when the clock of the machine is set
        if status := _status(pid):
            return None if status[0] in "ZX" else int(status[19])
    try:
        os.kill(pid, 0)
        process = psutil.Process(pid)
        return None if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else int(process.create_time())
    except (ProcessLookupError, psutil.NoSuchProcess):
        return None
    except psutil.AccessDenied as error:
        raise PermissionError(str(error)) from error
