"""Whether messages of this process wait for the network: what lies in the queues of its TCP connections."""

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

LOOK_SECONDS = 0.5
"""How often connections are looked for: they are made at the start, and now and then."""


class SocketQueues:
    """The TCP connections of this process, whoever made them: gloo keeps its own to itself.

    On systems other than Linux nothing is seen, and nothing waits.
    """

    def __init__(self) -> None:
        self._descriptors: list[int] = []
        self._looked = -LOOK_SECONDS

    def busy(self) -> bool:
        """Whether bytes have been handed over that the other end does not have yet."""
        if sys.platform != "linux":
            return False
        now = time.monotonic()
        if now - self._looked >= LOOK_SECONDS:
            self._looked, self._descriptors = now, _connections()
        return any(map(_waiting, self._descriptors))


def _waiting(descriptor: int) -> int:
    with suppress(OSError):  # closed meanwhile, or something else by now
        (size,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, b"\0\0\0\0"))
        return int(size)
    return 0


def _connections() -> list[int]:
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode) and status.st_ino not in found and _is_tcp(int(name)):
                found[status.st_ino] = int(name)
    return list(found.values())


def _is_tcp(descriptor: int) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as other:
        if other.family not in (socket.AF_INET, socket.AF_INET6) or other.type != socket.SOCK_STREAM:
            return False
        return not other.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
