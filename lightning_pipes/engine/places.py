"""Which process is meant, and whether it is known to have ended."""

from __future__ import annotations

import os
import socket

import psutil

Place = tuple[str, int]
"""The host and the number of a process."""


def own_place() -> Place:
    """This process."""
    return socket.gethostname(), os.getpid()


def is_near(place: Place) -> bool:
    """Whether this process would see that one end."""
    return place[0] == socket.gethostname()


def has_ended(place: Place) -> bool:
    """Whether a process is known to have ended; another host's never is."""
    if not is_near(place):
        return False
    try:
        return psutil.Process(place[1]).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False
