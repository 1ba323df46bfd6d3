"""Sockets between each two ranks of one host, for small messages with low latency.

A message is one write here and one read there, without a thread in between; gloo takes four changes of thread for it. A
message is an object as bytes; tensors are copied once at each end.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from lightning_pipes.engine.messages.local import PeerListener, connect_to
from lightning_pipes.engine.watch.failure import FailureWatch
from lightning_pipes.engine.watch.trust import Seal, dumps, loads

MOST = 16
"""Ranks that are connected each with each; with more of them a tree takes less."""
_HEAD = struct.Struct("<i q q")  # kind, number, bytes
_READ = 65536


class MessageId(NamedTuple):
    """Identifies a message; the sender and all receivers use the same one.

    Attributes:
        kind: messages of one kind are counted together.
        number: of the message within its kind.
    """

    kind: int
    number: int


class Mesh:
    """One rank's connections to all others.

    Made by all of them at a time, each with a `listener` whose name all know.

    Args:
        rank: the global rank of this process.
        names: the listeners' names, by global rank.

    Attributes:
        others: the global ranks of the others.

    Raises:
        PeerFailure: another rank has failed meanwhile.
        ForgedError: the listener is another program.
    """

    def __init__(self, rank: int, names: dict[int, str], listener: PeerListener, watch: FailureWatch) -> None:
        self.rank = rank
        self._peers: dict[int, _Peer] = {}
        self._received: dict[tuple[int, MessageId], bytearray] = {}
        self._poll = select.poll()
        for other, name in names.items():
            if other < rank:
                self._add(other, connect_to(name, rank))
        while awaited := [other for other in names if other != rank and other not in self._peers]:
            self._add(*listener.accept_peer(watch, awaited))
        self.others = tuple(self._peers)
        self._by_descriptor = {peer.socket.fileno(): peer for peer in self._peers.values()}

    def send(self, message_id: MessageId, data: bytes) -> None:
        """Send to all other ranks; calls of `exchange_until` send the rest, until `is_sent`.

        A peer that has closed its connection gets nothing.
        """
        message = _HEAD.pack(message_id.kind, message_id.number, len(data)) + data
        for peer in self._peers.values():
            peer.send(message)

    @property
    def is_sent(self) -> bool:
        """Whether all sent bytes have left."""
        return not any(peer.unsent for peer in self._peers.values())

    def has_messages(self, sources: Sequence[int], message_id: MessageId) -> bool:
        """Return whether all sent bytes have left and no message of these ranks is missing.

        Messages arrive in `exchange_until`. A closed connection misses none.
        """
        return self.is_sent and all((rank, message_id) in self._received or self._peers[rank].ended for rank in sources)

    def pop(self, source: int, message_id: MessageId) -> bytearray:
        """Remove and return the message that has arrived.

        Raises:
            ConnectionError: the peer closed its connection before.
        """
        if (source, message_id) not in self._received:
            raise ConnectionError(f"connection closed by rank {source}")
        return self._received.pop((source, message_id))

    def exchange_until(self, done: Callable[[], bool], seconds: float = 0.0) -> bool:
        """Send and receive ready messages, waiting at most `seconds` for more, and return `done()`."""
        if done():
            return True
        for peer in self._peers.values():
            if peer.unsent:
                self._poll.modify(peer.socket, select.POLLIN | select.POLLOUT)
        for descriptor, events in self._poll.poll(1000 * seconds):
            peer = self._by_descriptor[descriptor]
            if events & select.POLLOUT:
                peer.send(b"")
                self._poll.modify(descriptor, select.POLLIN)
            if events & ~select.POLLOUT:
                self._received.update({(peer.rank, message_id): data for message_id, data in peer.read_messages()})
            if peer.ended:
                self._poll.unregister(descriptor)
        return done()

    def close(self) -> None:
        """Close the connections."""
        for peer in self._peers.values():
            peer.socket.close()

    def _add(self, rank: int, made: socket.socket) -> None:
        made.setblocking(False)
        self._peers[rank] = _Peer(rank, made)
        self._poll.register(made, select.POLLIN)


class _Peer:
    """One connection.

    Attributes:
        unsent: what is still to be sent.
        ended: the other end is closed.
    """

    def __init__(self, rank: int, made: socket.socket) -> None:
        self.rank = rank
        self.socket = made
        self.unsent = b""
        self.ended = False
        self._read = bytearray()

    def send(self, data: bytes) -> None:
        """Send as much as the socket takes without blocking."""
        if self.ended:
            self.unsent = b""
            return
        data = self.unsent + data
        try:
            self.unsent = data[self.socket.send(data) :]
        except BlockingIOError:
            self.unsent = data
        except OSError:  # closed; what has arrived from there can still be read
            self.unsent = b""

    def read_messages(self) -> Sequence[tuple[MessageId, bytearray]]:
        """Return the messages that are complete by now."""
        try:
            data = self.socket.recv(_READ)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.ended, self.unsent = True, b""
            return []
        self._read += data
        found = []
        while len(self._read) >= _HEAD.size:
            kind, number, size = _HEAD.unpack_from(self._read)
            end = _HEAD.size + size
            if len(self._read) < end:
                break
            found.append((MessageId(kind, number), self._read[_HEAD.size : end]))
            del self._read[:end]
        return found


_NUMBER = struct.Struct("<q")


class PackedObject:
    """An object, ready to be written; its tensors arrive as plain tensors on the CPU.

    Args:
        seal: authenticates the object to its receivers, but not the contents of tensors.
    """

    def __init__(self, obj: Any, seal: Seal | None) -> None:
        buffers: list[pickle.PickleBuffer] = []
        parts = [memoryview(dumps(obj, seal, buffers.append)), *(buffer.raw() for buffer in buffers)]
        lengths = [len(parts), *(part.nbytes for part in parts)]
        self.parts = [memoryview(struct.pack(f"<{len(lengths)}q", *lengths)), *parts]
        """Its bytes, one part after another."""
        self.size = sum(part.nbytes for part in self.parts)
        """In bytes."""

    def write(self, into: torch.Tensor) -> None:
        """Fill the first `size` bytes of a tensor of bytes."""
        view, at = into.numpy().data, 0
        for part in self.parts:
            view[at : at + part.nbytes] = part
            at += part.nbytes


def unpack_object(data: memoryview, seal: Seal | None) -> Any:
    """Return the object at the beginning of these writable bytes; it shares no memory with them.

    Raises:
        PipelineError: the sender is not trusted.
    """
    (count,) = _NUMBER.unpack_from(data)
    parts, at = [], _NUMBER.size * (count + 1)
    for length in struct.unpack_from(f"<{count}q", data, _NUMBER.size):
        parts.append(data[at : at + length])
        at += length
    return loads(parts[0], seal, parts[1:])
