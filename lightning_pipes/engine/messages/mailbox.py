"""Stores received messages until they are used."""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Protocol

from lightning_pipes.engine.messages.message import Message
from lightning_pipes.ir import Instruction

INTERRUPT_POLL_SECONDS = 1.0
"""Longest uninterrupted wait, in seconds. Ctrl-C takes effect between two waits."""
Key = tuple[int, Instruction]
"""The number of a window, and the instruction that receives the message."""


class Mailbox:
    """Stores received messages by key. Other threads add the messages.

    A rank waits for all events in its mailbox, so that a failure on any rank can wake it.
    """

    def __init__(self) -> None:
        self._messages: dict[Key, Message] = {}
        self._unseen: dict[Key, None] = {}
        self._changes: SimpleQueue[None] = SimpleQueue()  # one entry for each change; the entries carry no data
        self._error: BaseException | None = None
        self._notified = False

    def put(self, message: Message) -> None:
        """Add a message that has arrived, and wake the waiting rank."""
        self._messages[message.key] = message
        self._unseen[message.key] = None
        self._changes.put(None)

    def fail_waiters(self, error: BaseException) -> None:
        """Raise `error` in all current and future waits."""
        self._error = self._error or error
        self._changes.put(None)

    def notify(self) -> None:
        """Wake the waiting rank after data has arrived through another channel, such as a bulk transfer."""
        self._notified = True
        self._changes.put(None)

    def has_message(self, key: Key) -> bool:
        """Return whether the message has arrived."""
        return key in self._messages

    def arrival_time(self, key: Key) -> int:
        """Return the arrival time of a message in nanoseconds of the monotonic clock, or 0 if it has not arrived."""
        message = self._messages.get(key)
        return 0 if message is None else message.arrived

    def take_message(self, key: Key) -> Message | None:
        """Remove and return the message. Return None if it has not arrived."""
        self._unseen.pop(key, None)
        if not self._changes.empty():  # otherwise, the queue of a rank that never has to wait would keep growing
            self._changes.get_nowait()
        return self._messages.pop(key, None)

    def take_new(self, window: int) -> list[Instruction]:
        """Return the receives of one window for messages that have arrived since the last call.

        Receives are left out if their message was already taken. The new messages of other windows remain new.

        Args:
            window: the number of the window.
        """
        found = [key for key in tuple(self._unseen) if key[0] == window]
        for key in found:
            del self._unseen[key]
        return [i for _, i in found]

    def wait_any(self, seconds: float) -> None:
        """Wait up to `seconds` until any message arrives.

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
            self.wait_any(INTERRUPT_POLL_SECONDS)

    def wait_new(self, window: int) -> list[Instruction]:
        """Wait until a new message of the window or a notification arrives, and return the result of `take_new`.

        Args:
            window: the number of the window.

        Raises:
            PeerFailure: a rank has failed.
        """
        while not (found := self.take_new(window)) and not self._notified:
            self.wait_any(INTERRUPT_POLL_SECONDS)
        self._notified = False
        return found


class Transport(Protocol):
    """Sends trees of tensors and plain values between the ranks of one pipeline."""

    @property
    def mailbox(self) -> Mailbox:
        """The mailbox that receives the messages from other ranks."""

    def send(self, rank: int, key: Key, tree: object, flags: tuple[bool, ...] = ()) -> None:
        """Start sending a tree to another rank, and return without waiting for its delivery.

        Args:
            rank: the pipeline rank of the receiver.
            key: the window, and the instruction that receives the tree.
            tree: tensors and plain values.
            flags: for each tensor of the tree, whether the sender needs its gradient.
        """

    def close(self) -> None:
        """Close all channels. Both ends of each channel must call this method."""
