"""Where messages wait for their use."""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, SimpleQueue
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
        self._messages: dict[Key, Message] = {}
        self._arrivals: SimpleQueue[Key | None] = SimpleQueue()
        self._error: BaseException | None = None

    def put(self, message: Message) -> None:
        """A message has arrived."""
        self._messages[message.key] = message
        self._arrivals.put(message.key)

    def fail(self, error: BaseException) -> None:
        """Whoever waits, or will, gets `error`."""
        self._error = self._error or error
        self._arrivals.put(None)

    def holds(self, key: Key) -> bool:
        """Whether the message is there."""
        return key in self._messages

    def take(self, key: Key) -> Message | None:
        """The message, or None if it is not there yet."""
        return self._messages.pop(key, None)

    def fresh(self) -> list[Key]:
        """The keys that have arrived since they were asked for last."""
        keys = []
        with suppress(Empty):
            while True:
                key = self._arrivals.get_nowait()
                if key is not None:
                    keys.append(key)
        return keys

    def wait(self, key: Key | None = None) -> list[Key]:
        """Waits until `key`, or without a key anything new, has arrived; returns what arrived meanwhile.

        Raises:
            PeerFailure: a rank has failed.
        """
        keys: list[Key] = []
        while not (key in self._messages if key is not None else keys):
            if self._error is not None:
                raise self._error
            with suppress(Empty):
                arrived = self._arrivals.get(timeout=1.0)  # bounded, to let Ctrl-C in
                if arrived is not None:
                    keys.append(arrived)
        return keys


class Transport(Protocol):
    """Moves trees between the ranks of one pipeline."""

    @property
    def mailbox(self) -> Mailbox:
        """Where what the other ranks send arrives."""

    def send(self, rank: int, key: Key, tree: object, flags: tuple[bool, ...] = ()) -> None:
        """Starts to send a tree to another pipeline rank and returns at once.

        `key` names its receive, `flags` says for each tensor whether its gradient is wanted.
        """

    def close(self) -> None:
        """Ends all channels; both ends must call it."""
