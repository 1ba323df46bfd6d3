"""Channels between processes of one host: tensors lie in shared memory, and a socket notifies the receiver.

A message costs one copy into memory that both ends map, and one small write. The write wakes the receiver itself,
without a thread in between.
"""

from __future__ import annotations

import array
import mmap
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import torch

from lightning_pipes.engine.messages.mailbox import Key, Mailbox
from lightning_pipes.engine.messages.message import Decoder, Encoder, ReceiveBuffer, Wire
from lightning_pipes.engine.watch.trust import ForgedError, same_user
from lightning_pipes.ir import Instruction, PipelineError

_RING = struct.Struct("<i i q q")  # kind of notice, number of the slot, its bytes, the sender's clock
_FRESH, _AGAIN, _DROP, _GOODBYE = range(4)
HELLO = struct.Struct("<i")  # the sender's global rank
_FREE, _TAKEN = 0, 1
CONNECT_SECONDS = 60.0


class LocalMailbox(Mailbox):
    """A mailbox that fetches messages on its owner's thread while the owner waits."""

    def __init__(self) -> None:
        super().__init__()
        self._poll = select.poll()
        self._readers: dict[int, Callable[[], None]] = {}
        self._closing, self._closed = threading.Lock(), False
        self._woken, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.watch_descriptor(self._woken, self._drain_waker)

    def watch_descriptor(self, descriptor: int, reader: Callable[[], None]) -> None:
        """Call `reader` whenever `descriptor` can be read."""
        self._readers[descriptor] = reader
        self._poll.register(descriptor, select.POLLIN)

    def unwatch_descriptor(self, descriptor: int) -> None:
        """Stop watching `descriptor`."""
        if self._readers.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def fail_waiters(self, error: BaseException) -> None:
        super().fail_waiters(error)
        self._wake()

    def notify(self) -> None:
        super().notify()
        self._wake()

    def _wake(self) -> None:
        with self._closing, suppress(OSError):  # closed, the number may belong to another file
            if not self._closed:
                os.write(self._waker, b"!")

    def fetch_messages(self, seconds: float = 0.0) -> None:
        """Read all arrived messages; wait up to `seconds` if there are none."""
        for descriptor, _ in self._poll.poll(1000 * seconds):
            reader = self._readers.get(descriptor)
            if reader is not None:
                reader()

    def has_message(self, key: Key) -> bool:
        if key in self._messages:
            return True
        self.fetch_messages()
        return key in self._messages

    def take_new(self, window: int) -> list[Instruction]:
        self.fetch_messages()
        return super().take_new(window)

    def wait_any(self, seconds: float) -> None:
        self.check()
        self.fetch_messages(seconds)

    def check(self) -> None:
        """Raise the reported failure, if any."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Close the descriptors; no wait may follow."""
        with self._closing:
            self._closed = True
            os.close(self._woken)
            os.close(self._waker)

    def _drain_waker(self) -> None:
        with suppress(OSError):
            os.read(self._woken, 64)


def connect_to(name: str, rank: int) -> socket.socket:
    """Return a connection of global rank `rank` to the listener `name`, in non-blocking mode.

    Raises:
        ForgedError: another user listens there.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.settimeout(CONNECT_SECONDS)
        made.connect(name)
        if not same_user(made):
            raise ForgedError(f"{name!r} is no socket of this run's user")
        made.sendall(HELLO.pack(rank))
        made.setblocking(False)
    except BaseException:
        made.close()
        raise
    return made


def _map_memory(descriptor: int, size: int) -> torch.Tensor:
    """Return the memory of one message, mapped by both ends."""
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)


class LocalOutbox:
    """The sending end. `send` copies the tensors and returns."""

    def __init__(self, name: str, rank: int, mailbox: LocalMailbox, lost: Callable[[BaseException], None]) -> None:
        self._mailbox, self._lost = mailbox, lost
        self._encoder = Encoder(self._allocate, self._forget)
        self._slots: dict[int, int] = {}  # address of a wire's bytes -> number of its slot
        self._descriptors: dict[int, tuple[int, int]] = {}  # number -> descriptor and bytes, until the peer has it
        self._count = 0
        self._in_flight: deque[Wire] = deque()
        self._socket = connect_to(name, rank)

    def send(self, key: Key, tree: object, flags: tuple[bool, ...] = ()) -> None:
        """Send one message; messages arrive in the order of these calls."""
        while self._in_flight and self._in_flight[0].bytes[0] == _FREE:
            self._encoder.release(self._in_flight.popleft())
        wire, tensors = self._encoder.encode(key, tree, flags, time.monotonic_ns())
        wire.copy_tensors(tensors)
        wire.bytes[0] = _TAKEN
        self._in_flight.append(wire)
        number = self._slots[wire.address]
        fresh = self._descriptors.pop(number, None)
        if fresh is None:
            self._notify_peer(_AGAIN, number)
        else:
            self._notify_peer(_FRESH, number, *fresh)
            os.close(fresh[0])

    def close(self, failed: bool) -> None:
        """Send an end mark to the peer."""
        if not failed:
            self._notify_peer(_GOODBYE, 0)
        self._socket.close()
        for descriptor, _ in self._descriptors.values():
            os.close(descriptor)

    def _allocate(self, size: int) -> torch.Tensor:
        descriptor = os.memfd_create("lightning_pipes", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size)
        tensor = _map_memory(descriptor, size)
        self._slots[tensor.data_ptr()] = self._count
        self._descriptors[self._count] = (descriptor, size)
        self._count += 1
        return tensor

    def _forget(self, wire: Wire) -> None:
        """Release a slot that neither end needs any longer."""
        number = self._slots.pop(wire.address)
        descriptor, _ = self._descriptors.pop(number, (-1, 0))
        if descriptor >= 0:
            os.close(descriptor)
        else:
            self._notify_peer(_DROP, number)

    def _notify_peer(self, what: int, number: int, descriptor: int = -1, size: int = 0) -> None:
        data = _RING.pack(what, number, size, time.monotonic_ns())
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))] if descriptor >= 0 else []
        try:
            while True:
                try:
                    sent = self._socket.sendmsg([data], rights) if rights else self._socket.send(data)
                    if sent == len(data):
                        return
                    data, rights = data[sent:], []
                except BlockingIOError:  # hundreds of messages wait unread: read ours meanwhile
                    self._mailbox.check()
                    self._mailbox.fetch_messages(0.001)
        except OSError as error:
            self._lost(error)
            self._mailbox.check()
            raise


class LocalInbox:
    """The receiving end, read by the mailbox's owner."""

    def __init__(self, connection: socket.socket, mailbox: LocalMailbox, lost: Callable[[BaseException], None]) -> None:
        self._socket, self._mailbox, self._lost = connection, mailbox, lost
        self._decoder = Decoder()
        self._slots: dict[int, ReceiveBuffer] = {}
        self._partial = b""
        self.ended = False
        connection.setblocking(False)
        mailbox.watch_descriptor(connection.fileno(), self._read)

    def close(self) -> None:
        self._mailbox.unwatch_descriptor(self._socket.fileno())
        self._socket.close()

    def _read(self) -> None:
        try:
            data, ancillary, _, _ = self._socket.recvmsg(_RING.size - len(self._partial), socket.CMSG_SPACE(4))
        except BlockingIOError:
            return
        except OSError as error:
            self._on_lost(error)
            return
        if not data:
            self._on_lost(ConnectionError("connection closed by peer"))
            return
        descriptors = array.array("i")
        for _, _, content in ancillary:
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
        self._partial += data
        if len(self._partial) == _RING.size:
            ring, self._partial = self._partial, b""
            what, number, size, rung = _RING.unpack(ring)
            self._handle(what, number, size, rung, descriptors)

    def _handle(self, what: int, number: int, size: int, rung: int, descriptors: array.array[int]) -> None:
        if what == _GOODBYE:
            self.ended = True
            self._mailbox.unwatch_descriptor(self._socket.fileno())
        elif what == _DROP:
            self._slots.pop(number, None)
        else:
            if what == _FRESH:
                if not descriptors:
                    raise PipelineError("shared memory did not arrive: too many open files? raise `ulimit -n`")
                self._slots[number] = ReceiveBuffer(_map_memory(descriptors[0], size))
                os.close(descriptors[0])
            slot = self._slots[number]
            message = self._decoder.decode_copy(slot, rung)  # it was complete when the notice was sent
            slot.bytes[0] = _FREE
            self._mailbox.put(message)

    def _on_lost(self, error: BaseException) -> None:
        self._mailbox.unwatch_descriptor(self._socket.fileno())
        if not self.ended:
            self.ended = True
            self._lost(error)
