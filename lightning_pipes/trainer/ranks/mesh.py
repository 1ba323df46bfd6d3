"""Sockets between all pairs of ranks of one host, for small messages with low latency.

A message takes one write at the sender and one read at the receiver, without a thread in between. With gloo, it takes
four thread switches. A message is an object in serialized form. Tensors are copied once at each end.
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

MAX_CONNECTED_RANKS = 16
"""The largest number of ranks for which all pairs are connected. For more ranks, a tree is faster."""
_HEAD_FORMAT = struct.Struct("<i q q")  # kind, number, bytes
_SOCKET_READ_BYTES = 65536


class MessageId(NamedTuple):
    """The ID of a message. The sender and all receivers use the same one.

    Attributes:
        kind: the kind of the message. Messages of each kind are counted separately.
        number: the number of the message within its kind.
    """

    kind: int
    number: int


class Mesh:
    """The connections of one rank to all other ranks.

    All ranks create it at the same time, each with a `listener` whose name is known to all of them.

    Args:
        rank: the global rank of this process.
        names: the names of the listeners, by global rank.
        listener: accepts the connections of higher ranks.
        watch: notices failures of ranks.

    Attributes:
        others: the global ranks of the other processes.

    Raises:
        PeerFailure: another rank has failed in the meantime.
        ForgedError: another program listens under the name of a listener.
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
        """Send a message to all other ranks.

        Bytes that can't be sent immediately are sent by calls of `exchange_until`, until `is_sent` is True. A peer that
        has closed its connection receives nothing.
        """
        message = _HEAD_FORMAT.pack(message_id.kind, message_id.number, len(data)) + data
        for peer in self._peers.values():
            peer.send(message)

    @property
    def is_sent(self) -> bool:
        """Whether all messages have been sent completely."""
        return not any(peer.unsent for peer in self._peers.values())

    def has_messages(self, sources: Sequence[int], message_id: MessageId) -> bool:
        """Return whether all messages have been sent completely, and the messages of these ranks have arrived.

        Messages are received in `exchange_until`. For a closed connection, no message counts as missing.
        """
        return self.is_sent and all((rank, message_id) in self._received or self._peers[rank].ended for rank in sources)

    def pop(self, source: int, message_id: MessageId) -> bytearray:
        """Remove and return a message that has arrived.

        Raises:
            ConnectionError: the peer closed its connection before.
        """
        if (source, message_id) not in self._received:
            raise ConnectionError(f"connection closed by rank {source}")
        return self._received.pop((source, message_id))

    def exchange_until(self, done: Callable[[], bool], seconds: float = 0.0) -> bool:
        """Send and receive all messages that are ready, wait at most `seconds` for more, and return `done()`."""
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
    """The connection to one rank.

    Attributes:
        unsent: the bytes that still have to be sent.
        ended: whether the other end is closed.
    """

    def __init__(self, rank: int, made: socket.socket) -> None:
        self.rank = rank
        self.socket = made
        self.unsent = b""
        self.ended = False
        self._read = bytearray()

    def send(self, data: bytes) -> None:
        """Send as many bytes as possible without blocking."""
        if self.ended:
            self.unsent = b""
            return
        data = self.unsent + data
        try:
            self.unsent = data[self.socket.send(data) :]
        except BlockingIOError:
            self.unsent = data
        except OSError:  # closed; data that has arrived can still be read
            self.unsent = b""

    def read_messages(self) -> Sequence[tuple[MessageId, bytearray]]:
        """Return the messages that are complete."""
        try:
            data = self.socket.recv(_SOCKET_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.ended, self.unsent = True, b""
            return []
        self._read += data
        found = []
        while len(self._read) >= _HEAD_FORMAT.size:
            kind, number, size = _HEAD_FORMAT.unpack_from(self._read)
            end = _HEAD_FORMAT.size + size
            if len(self._read) < end:
                break
            found.append((MessageId(kind, number), self._read[_HEAD_FORMAT.size : end]))
            del self._read[:end]
        return found


_NUMBER_FORMAT = struct.Struct("<q")


class PackedObject:
    """An object in serialized form. Its tensors arrive as plain tensors on the CPU.

    Args:
        obj: the object.
        seal: authenticates the object to its receivers, but not the contents of tensors.
    """

    def __init__(self, obj: Any, seal: Seal | None) -> None:
        buffers: list[pickle.PickleBuffer] = []
        parts = [memoryview(dumps(obj, seal, buffers.append)), *(buffer.raw() for buffer in buffers)]
        lengths = [len(parts), *(part.nbytes for part in parts)]
        self.parts = [memoryview(struct.pack(f"<{len(lengths)}q", *lengths)), *parts]
        """The bytes of the object, as consecutive parts."""
        self.size = sum(part.nbytes for part in self.parts)
        """The number of bytes."""

    def write(self, into: torch.Tensor, begin: int = 0) -> None:
        """Fill a tensor of bytes with the bytes of the object from `begin` on, as far as there are any."""
        view, at = into.numpy().data, -begin
        for part in self.parts:
            first, last = max(0, at), min(len(view), at + part.nbytes)
            if first < last:
                view[first:last] = part[first - at : last - at]
            at += part.nbytes


def unpack_object(data: memoryview, seal: Seal | None) -> Any:
    """Return the object at the beginning of these writable bytes. It shares no memory with them.

    Raises:
        PipelineError: the sender is not trusted.
    """
    (count,) = _NUMBER_FORMAT.unpack_from(data)
    parts, at = [], _NUMBER_FORMAT.size * (count + 1)
    for length in struct.unpack_from(f"<{count}q", data, _NUMBER_FORMAT.size):
        parts.append(data[at : at + length])
        at += length
    return loads(parts[0], seal, parts[1:])
