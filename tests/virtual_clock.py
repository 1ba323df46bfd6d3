"""A clock for the package that advances only when a test advances it."""

from __future__ import annotations

import threading

import pytest

from lightning_pipes.engine.messages.mailbox import Key, Mailbox
from lightning_pipes.engine.messages.message import Message
from lightning_pipes.ir import clock

TICK = 1000
"""Nanoseconds by which each read in the main thread advances the clock, so that every computation takes some time."""


class VirtualClock(clock.Clock):
    """A clock that is advanced by the seconds that layers pass to `sleep`, and by messages.

    A rank that receives a message advances its clock to the time at which the message was sent. Messages therefore take
    no time, and a step of several ranks takes the time predicted by theory, however slow or busy the machine is.
    """

    def __init__(self) -> None:
        self._seconds, self._nanoseconds = 0.0, 0

    def read_seconds(self) -> float:
        return self._seconds

    def read_nanoseconds(self) -> int:
        if threading.current_thread() is threading.main_thread():
            self._nanoseconds += TICK
        return round(1e9 * self._seconds) + self._nanoseconds

    def sleep(self, seconds: float) -> None:
        self._seconds += seconds or TICK / 1e9

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        """Make the package read this clock in this process and in its forks."""
        take = Mailbox.take_message

        def take_message(mailbox: Mailbox, key: Key) -> Message | None:
            message = take(mailbox, key)
            if message is None or not message.arrived:
                return message
            now = round(1e9 * self._seconds) + self._nanoseconds
            self._seconds += max(0, message.sent - now) / 1e9
            return message._replace(posted=message.sent, arrived=message.sent)

        patch.setattr(clock, "_clock", self)
        patch.setattr(Mailbox, "take_message", take_message)
