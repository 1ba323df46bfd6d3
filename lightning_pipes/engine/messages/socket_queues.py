"""Reads the send queues of this process's TCP connections, to see whether messages wait for the network."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

BULK = 2
"""A priority below the default in Linux's queues, such as pfifo_fast."""
_BYTES_ACKED = 120
"""Where in Linux's tcp_info."""
_scan_lock = threading.Lock()
"""Held while descriptors are duplicated, because a descriptor closed meanwhile can't be read."""
SCAN_SECONDS = 0.5
"""Seconds between two scans for connections: most are made at the start."""


class SocketQueues:
    """All TCP connections of this process, including gloo's private ones.

    Systems other than Linux report nothing, so nothing waits there.
    """

    def __init__(self) -> None:
        self._descriptors: list[int] = []
        self._looked = -SCAN_SECONDS

    def has_unsent_bytes(self) -> bool:
        """Return whether sent bytes are not acknowledged by the other end yet."""
        if sys.platform != "linux":
            return False
        now = time.monotonic()
        if now - self._looked >= SCAN_SECONDS:
            self._looked, self._descriptors = now, list(_connections().values())
        return any(map(_waiting, self._descriptors))


def _waiting(descriptor: int) -> int:
    with suppress(OSError):  # closed meanwhile, or something else by now
        (size,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, b"\0\0\0\0"))
        return int(size)
    return 0


class SendRate:
    """Bytes per second that this process sends by connections that are not marked as bulk."""

    def __init__(self) -> None:
        self._looked, self._acknowledged, self._rate = time.monotonic(), 0, 0.0

    def bytes_per_second(self) -> float:
        """Return the rate of about the last SCAN_SECONDS; 0 on systems other than Linux."""
        now = time.monotonic()
        if sys.platform == "linux" and now - self._looked >= SCAN_SECONDS:
            with _scan_lock:
                sent = sum(_acknowledged(d) for d in _connections().values() if _priority(d) != BULK)
            if self._acknowledged:
                self._rate = max(0, sent - self._acknowledged) / (now - self._looked)
            self._looked, self._acknowledged = now, sent
        return self._rate


@contextmanager
def mark_connections_as_bulk() -> Iterator[None]:
    """Give connections created in the block a lower priority, where a queue of the network respects priorities."""
    if sys.platform != "linux":
        yield
        return
    with _scan_lock:
        before = _connections()
    yield  # the other end may wait for another such block, so nothing is held
    with _scan_lock:
        for inode, descriptor in _connections().items():
            if inode not in before:
                with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as other:
                    other.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, BULK)


def _priority(descriptor: int) -> int:
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as other:
        return other.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY)
    return BULK  # closed meanwhile


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
