"""Where messages wait for their use."""

from __future__ import annotations

import threading
from typing import Protocol

from lightning_pipes.engine.message import Message
from lightning_pipes.ir import Instruction

Key = tuple[int, Instruction]
"""A window's number and the instruction that receives."""


class Mailbox:
    """Messages by key, filled by other threads.

    Everything that a rank may have to wait for comes through here, so that a failure anywhere can wake it.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._messages: dict[Key, Message] = {}
        self._fresh: dict[Key, None] = {}
        self._error: BaseException | None = None

    def put(self, message: Message) -> None:
        """A message has arrived."""
        with self._condition:
            self._messages[message.key] = message
            self._fresh[message.key] = None
            self._condition.notify_all()

    def fail(self, error: BaseException) -> None:
        """Whoever waits, or will, gets `error`."""
        with self._condition:
            self._error = self._error or error
            self._condition.notify_all()

    def take(self, key: Key) -> Message | None:
        """The message, or None if it is not there yet."""
        with self._condition:
            self._fresh.pop(key, None)
            return self._messages.pop(key, None)

    def holds(self, key: Key) -> bool:
        """Whether the message is there."""
        return key in self._messages

    def fresh(self) -> list[Key]:
        """The keys that have arrived since the last call."""
        with self._condition:
            keys, self._fresh = list(self._fresh), {}
            return keys

    def wait(self, key: Key | None = None) -> None:
        """Returns once `key`, or without a key anything new, has arrived.

        Raises:
            PeerFailure: a rank has failed.
        """
        with self._condition:
            while not (key in self._messages if key is not None else self._fresh):
                if self._error is not None:
                    raise self._error
                self._condition.wait(1.0)  # a bounded wait lets Ctrl-C in


class Transport(Protocol):
    """Moves trees between the ranks of one pipeline."""

    mailbox: Mailbox

    def send(self, rank: int, key: Key, tree: object, flags: tuple[bool, ...] = ()) -> None:
        """Starts to send a tree to another pipeline rank and returns at once.

        `key` names its receive, `flags` says for each tensor whether its gradient is wanted.
        """

    def flush(self) -> None:
        """Returns once every message has left."""

    def close(self) -> None:
        """Ends all channels; both ends must call it."""
