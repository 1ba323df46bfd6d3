"""Identifies a process among all that may share a folder, store or database.

A host name and a process number do not suffice: containers may share a host name and number their processes separately,
and numbers are reused.
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
"""The number that Linux gives to the PID name space of the machine itself."""


class Process(NamedTuple):
    """The identity of a process.

    Attributes:
        machine: a hash of the host's name and, where there is one, the machine's id.
        boot: a hash of the boot id; empty where there is none.
        space: the PID namespace of `pid`; empty where there are none.
        pid: its number.
        started: its start time, in a unit of the system.
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
        """Return the identity of another process of this PID namespace.

        Raises:
            ProcessLookupError: there is none.
        """
        started = _start_time(pid)
        if started is None:
            raise ProcessLookupError(f"there is no process {pid}")
        return cls(*_host_marks(), pid, started)

    @classmethod
    def parse(cls, text: str) -> Process | None:
        """Return the process with the text form `text`; None if there is no such form."""
        parts = text.split("-")
        if len(parts) != 5 or not all(part.isdigit() for part in parts[3:]):
            return None
        machine, boot, space, pid, started = parts
        return cls(machine, boot, space, int(pid), int(started))

    def __str__(self) -> str:
        """Return letters, digits and hyphens."""
        return "-".join(map(str, self))

    def has_ended(self) -> bool:
        """Return whether the process is known to have ended. Processes of other machines and containers are unknown. A
        process from before the machine's last boot has ended."""
        machine, boot, space = _host_marks()
        if self.machine != machine or self.space != space:
            return False
        if self.boot != boot:
            return bool(self.boot and boot) and space == _FIRST_SPACE
        with suppress(PermissionError):  # another user's process, which the system does not describe
            return _start_time(self.pid) != self.started
        return False


def is_stopped(pid: int) -> bool:
    """Return whether a process of this PID namespace waits for SIGCONT; unknown on systems other than Linux."""
    state = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return state[:1] == ["T"]  # a debugger's are "t"


def has_ended(pid: int) -> bool:
    """Return whether no such process runs in this PID namespace, zombies excluded; unknown on systems other than
    Linux."""
    state = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return state[:1] in ([], ["Z"], ["X"])


@cache
def _process(pid: int) -> Process:
    return Process.from_pid(pid)


@cache
def _host_marks() -> tuple[str, str, str]:
    """Return the marks that all processes of this PID namespace share."""
    machine = _short(f"{socket.gethostname()}/{_read('/etc/machine-id')}")
    boot = _read("/proc/sys/kernel/random/boot_id")
    space = ""
    with suppress(OSError):
        space = f"{os.stat('/proc/self/ns/pid').st_ino:x}"
    return machine, _short(boot) if boot else "", space


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _read(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text().strip()
    return ""


def _start_time(pid: int) -> int | None:
    """Return the start time of a process; None if it has ended, also as a zombie.

    Raises:
        PermissionError: the system denies access.
    """
    if sys.platform == "linux":  # psutil's times move with the clock of the machine
        with suppress(FileNotFoundError, ProcessLookupError):
            state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return None if state in "ZX" else int(rest[18])
    try:
        os.kill(pid, 0)
        process = psutil.Process(pid)
        return None if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else int(process.create_time())
    except (ProcessLookupError, psutil.NoSuchProcess):
        return None
    except psutil.AccessDenied as error:
        raise PermissionError(str(error)) from error
