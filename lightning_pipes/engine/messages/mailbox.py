"""Received messages that wait for their use."""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Protocol

from lightning_pipes.engine.messages.message import Message
from lightning_pipes.ir import Instruction

POLL_SECONDS = 1.0
"""The longest uninterrupted wait; Ctrl-C takes effect in between."""
Key = tuple[int, Instruction]
"""A window's number and the instruction that receives."""


class Mailbox:
    """Messages by key, filled by other threads.

    A rank waits here for everything, so that a failure anywhere can wake it.
    """

    def __init__(self) -> None:
        self._messages: dict[Key, Message] = {}
        self._unseen: dict[Key, None] = {}
        self._changes: SimpleQueue[None] = SimpleQueue()  # one entry after each change, without its content
        self._error: BaseException | None = None
        self._notified = False

    def put(self, message: Message) -> None:
        """Add a message that has arrived."""
        self._messages[message.key] = message
        self._unseen[message.key] = None
        self._changes.put(None)

    def fail_waiters(self, error: BaseException) -> None:
        """Raise `error` in every current and future waiter."""
        self._error = self._error or error
        self._changes.put(None)

    def notify(self) -> None:
        """Wake a rank that waits for news, after something has arrived by another way, such as a bulk transfer."""
        self._notified = True
        self._changes.put(None)

    def has_message(self, key: Key) -> bool:
        """Return whether the message has arrived."""
        return key in self._messages

    def arrival_time(self, key: Key) -> int:
        """Return when the message arrived, in nanoseconds of the monotonic clock; 0 if it has not arrived."""
        message = self._messages.get(key)
        return 0 if message is None else message.arrived

    def take_message(self, key: Key) -> Message | None:
        """Remove and return the message, or return None if it has not arrived."""
        self._unseen.pop(key, None)
        if not self._changes.empty():  # a rank that never has to wait must not pile up rings
            self._changes.get_nowait()
        return self._messages.pop(key, None)

    def take_new(self, window: int) -> list[Instruction]:
        """Return the receives of window `window` with messages that arrived since the last call, without those already
        taken. Those of other windows stay."""
        found = [key for key in tuple(self._unseen) if key[0] == window]
        for key in found:
            del self._unseen[key]
        return [i for _, i in found]

    def wait_any(self, seconds: float) -> None:
        """Wait until any message has arrived, or for `seconds`.

        Raises:
            PeerFailure: a rank has failed.
        """
        if self._error is not None:
            raise self._error
        with suppress(Empty):
            self._changes.get(timeout=seconds)

    def wait(self, key: Key) -> None:
        """Wait until the message has arrived.

        Raises:
            PeerFailure: a rank has failed.
        """
        while key not in self._messages:
            self.wait_any(POLL_SECONDS)

    def wait_new(self, window: int) -> list[Instruction]:
        """Wait until a message of the window or a notification has arrived; return `take_new`.

        Raises:
            PeerFailure: a rank has failed.
        """
        while not (found := self.take_new(window)) and not self._notified:
            self.wait_any(POLL_SECONDS)
        self._notified = False
        return found


class Transport(Protocol):
    """Moves trees between the ranks of one pipeline."""

    @property
    def mailbox(self) -> Mailbox:
        """The mailbox for messages from other ranks."""

    def send(self, rank: int, key: Key, tree: object, flags: tuple[bool, ...] = ()) -> None:
        """Start to send a tree to another pipeline rank, and return at once.

        `key` names its receive; `flags` tells for each tensor whether the sender wants its gradient.
        """

    def close(self) -> None:
        """Close all channels; both ends must call it."""
