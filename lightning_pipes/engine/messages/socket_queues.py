"""Reads the send queues of this process's TCP connections, to see whether messages wait for the network."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
import sys
import termios
import time
from contextlib import suppress

SCAN_SECONDS = 0.5
"""Seconds between two scans for connections: most are made at the start."""
_BYTES_ACKED = 120
"""Where in Linux's tcp_info."""


class SocketQueues:
    """All TCP connections of this process, including gloo's private ones.

    Systems other than Linux report nothing, so nothing waits there.
    """

    def __init__(self) -> None:
        self._descriptors: list[int] = []
        self._looked = -SCAN_SECONDS

    def unsent_bytes(self) -> int:
        """Return the bytes that were sent and are not acknowledged by the other end yet."""
        return sum(map(_waiting, self._scan()))

    def acknowledged_bytes(self) -> int:
        """Return the bytes that the other ends have acknowledged so far."""
        return sum(map(_acknowledged, self._scan()))

    def _scan(self) -> list[int]:
        now = time.monotonic()
        if sys.platform == "linux" and now - self._looked >= SCAN_SECONDS:
            self._looked, self._descriptors = now, list(_connections().values())
        return self._descriptors


def _waiting(descriptor: int) -> int:
    with suppress(OSError):  # closed meanwhile, or something else by now
        (size,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, b"\0\0\0\0"))
        return int(size)
    return 0


def _acknowledged(descriptor: int) -> int:
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as other:
        info = other.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 8)
        if len(info) == _BYTES_ACKED + 8:
            return int(struct.unpack_from("Q", info, _BYTES_ACKED)[0])
    return 0


def _connections() -> dict[int, int]:
    """Return descriptors by inode; scanning duplicates some of them."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode) and status.st_ino not in found and _is_tcp(int(name)):
                found[status.st_ino] = int(name)
    return found


def _is_tcp(descriptor: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as other:
        if other.family not in (socket.AF_INET, socket.AF_INET6) or other.type != socket.SOCK_STREAM:
            return False
        return not other.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
