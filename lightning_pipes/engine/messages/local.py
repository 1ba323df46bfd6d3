"""Channels between processes of one host. Tensors are written to shared memory, and a socket notifies the receiver.

A message costs one copy into memory that both processes map, and one small write to a Unix socket. The write wakes the
receiving thread directly, without an intermediate thread. `LocalTransport` connects ranks that run on the same host.
"""

from __future__ import annotations

import array
import mmap
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from lightning_pipes.engine.messages.mailbox import Key, Mailbox
from lightning_pipes.engine.messages.message import Decoder, Encoder, ReceiveBuffer, Wire
from lightning_pipes.engine.watch.failure import FailureWatch
from lightning_pipes.engine.watch.fault_points import fault_point
from lightning_pipes.engine.watch.identity import read_boot_id, read_namespace
from lightning_pipes.engine.watch.trust import ForgedError, same_user
from lightning_pipes.ir import Instruction, Kind, PipelineError, Plan
from lightning_pipes.ir.clock import read_nanoseconds

_RING = struct.Struct("<i i q q")  # kind of notice, number of the slot, bytes of the slot, time on the sender's clock
_FRESH, _AGAIN, _DROP, _GOODBYE = range(4)
HELLO_FORMAT = struct.Struct("<i")  # global rank of the sender
_FREE, _TAKEN = 0, 1
GREETING_SECONDS = 60.0
"""Maximum time for a listening peer to accept a connection, and for a connected peer to send its rank, in seconds."""


class LocalMailbox(Mailbox):
    """A mailbox whose messages are read from the sockets by the thread that owns the mailbox, while it waits."""

    def __init__(self) -> None:
        super().__init__()
        self._poll = select.poll()
        self._readers: dict[int, Callable[[], None]] = {}
        self._closing, self._closed = threading.Lock(), False
        self._woken, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.watch_descriptor(self._woken, self._drain_waker)

    def watch_descriptor(self, descriptor: int, reader: Callable[[], None]) -> None:
        """Call `reader` whenever `descriptor` is readable."""
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
        with self._closing, suppress(OSError):  # once the descriptor is closed, another file may get its number
            if not self._closed:
                os.write(self._waker, b"!")

    def fetch_messages(self, seconds: float = 0.0) -> None:
        """Read all messages that have arrived. If there are none, wait up to `seconds` for the first one."""
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
        """Raise the reported failure if there is one."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Close the descriptors. The mailbox can't be waited for afterwards."""
        with self._closing:
            self._closed = True
            os.close(self._woken)
            os.close(self._waker)

    def _drain_waker(self) -> None:
        with suppress(OSError):
            os.read(self._woken, 64)


def connect_to(name: str, rank: int) -> socket.socket:
    """Connect global rank `rank` to the listener `name`.

    Args:
        name: the address of the listener, as in `PeerListener.name`.
        rank: the global rank of the caller, which is sent to the listener.

    Returns:
        The connection, in non-blocking mode.

    Raises:
        ForgedError: the listening process belongs to another user.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.settimeout(GREETING_SECONDS)
        made.connect(name)
        if not same_user(made):
            raise ForgedError(f"{name!r} is not a socket of this run's user")
        made.sendall(HELLO_FORMAT.pack(rank))
        made.setblocking(False)
    except BaseException:
        made.close()
        raise
    return made


def _map_memory(descriptor: int, size: int) -> torch.Tensor:
    """Map the shared memory of one message."""
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)


class LocalOutbox:
    """The sending end of a channel. `send` copies the tensors to shared memory and returns."""

    def __init__(self, name: str, rank: int, mailbox: LocalMailbox, lost: Callable[[BaseException], None]) -> None:
        self._mailbox, self._lost = mailbox, lost
        self._encoder = Encoder(self._allocate, self._forget)
        self._slots: dict[int, int] = {}  # address of the bytes of a wire -> number of its slot
        self._descriptors: dict[int, tuple[int, int]] = {}  # number of each slot not sent yet -> descriptor, bytes
        self._count = 0
        self._in_flight: deque[Wire] = deque()
        self._socket = connect_to(name, rank)

    def send(self, key: Key, tree: object, flags: tuple[bool, ...] = ()) -> None:
        """Send one message. Messages arrive in the order of the calls."""
        while self._in_flight and self._in_flight[0].bytes[0] == _FREE:
            self._encoder.release(self._in_flight.popleft())
        wire, tensors = self._encoder.encode(key, tree, flags, read_nanoseconds())
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
        """Send an end mark to the peer unless the run has failed, and close the connection."""
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
        """Release a slot that is no longer used by either end."""
        number = self._slots.pop(wire.address)
        descriptor, _ = self._descriptors.pop(number, (-1, 0))
        if descriptor >= 0:
            os.close(descriptor)
        else:
            self._notify_peer(_DROP, number)

    def _notify_peer(self, what: int, number: int, descriptor: int = -1, size: int = 0) -> None:
        data = _RING.pack(what, number, size, read_nanoseconds())
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))] if descriptor >= 0 else []
        try:
            while True:
                try:
                    sent = self._socket.sendmsg([data], rights) if rights else self._socket.send(data)
                    if sent == len(data):
                        return
                    data, rights = data[sent:], []
                except BlockingIOError:  # the peer has hundreds of unread messages: read arrived messages meanwhile
                    self._mailbox.check()
                    self._mailbox.fetch_messages(0.001)
        except OSError as error:
            self._lost(error)
            self._mailbox.check()
            raise


class LocalInbox:
    """The receiving end of a channel, which is read by the thread that owns the mailbox."""

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
            message = self._decoder.decode_copy(slot, rung)  # the message was complete when the notice was sent
            slot.bytes[0] = _FREE
            self._mailbox.put(message)

    def _on_lost(self, error: BaseException) -> None:
        self._mailbox.unwatch_descriptor(self._socket.fileno())
        if not self.ended:
            self.ended = True
            self._lost(error)


_RECEIVE_OF_SEND = {Kind.SF: Kind.RF, Kind.SB: Kind.RB}


def host_id() -> str:
    """Return an identifier of the host, which is equal for processes that can share memory and sockets.

    Such processes run in the same network namespace of one machine, under the same user. The result is empty on systems
    other than Linux, on which sharing is not supported.
    """
    boot = read_boot_id()
    return f"{boot}/{read_namespace('net')}/{os.getuid()}" if boot else ""


class PeerListener:
    """A socket that accepts the connections of the peers of one rank."""

    def __init__(self) -> None:
        self.name = f"\0lightning_pipes-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.name)
        self._socket.listen(64)

    def accept_peer(self, watch: FailureWatch, awaited: Sequence[int]) -> tuple[int, socket.socket]:
        """Accept the connection of the next peer. Connections of other users are closed.

        Args:
            watch: the failure watch of the run.
            awaited: the global ranks that have not connected yet.

        Returns:
            The global rank of the peer, and its connection.

        Raises:
            PeerFailure: another rank failed, or no awaited rank connected within the timeout of the run.
        """
        self._socket.settimeout(0.5)
        deadline = time.monotonic() + watch.setup_seconds
        while True:
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                watch.check()
                if time.monotonic() > deadline:
                    watch.report_late_ranks(awaited)
                continue
            if not same_user(connection):  # messages are unpickled, so other users must not be able to send them
                connection.close()
                continue
            connection.settimeout(GREETING_SECONDS)
            (rank,) = HELLO_FORMAT.unpack(connection.recv(HELLO_FORMAT.size, socket.MSG_WAITALL))
            return rank, connection

    def close(self) -> None:
        self._socket.close()


class LocalTransport:
    """A transport for ranks on one host with tensors in CPU memory. It has one channel per neighbor and direction."""

    def __init__(self, plan: Plan, rank: int, global_ranks: Sequence[int], watch: FailureWatch, store: PrefixStore):
        mailbox = self.mailbox = LocalMailbox()
        self._watch = watch
        self._out: dict[tuple[int, Kind], LocalOutbox] = {}  # by destination rank and kind of its receive
        self._in: list[LocalInbox] = []
        watch.on_failure(mailbox.fail_waiters)
        mine = global_ranks[rank]
        listener = PeerListener()
        store.set(f"address/{mine}", listener.name)
        fault_point("transport.told")

        def make_lost_handler(peer: int) -> Callable[[BaseException], None]:
            return lambda error: watch.report_lost_peer(peer, error)

        expected: list[int] = []
        for source, destination, kind in plan.directed_links:
            if rank == source:
                peer = global_ranks[destination]
                address = watch.wait_for_values(store, {peer: f"address/{peer}"})[peer]
                self._out[destination, _RECEIVE_OF_SEND[kind]] = LocalOutbox(
                    address, mine, mailbox, make_lost_handler(peer)
                )
            elif rank == destination:
                expected.append(global_ranks[source])
        while expected:
            peer, connection = listener.accept_peer(watch, expected)
            expected.remove(peer)
            self._in.append(LocalInbox(connection, mailbox, make_lost_handler(peer)))
        listener.close()

    def send(self, rank: int, key: Key, tree: object, flags: tuple[bool, ...] = ()) -> None:
        self._out[rank, key[1].kind].send(key, tree, flags)

    def close(self) -> None:
        failed = self._watch.error is not None
        for outbox in self._out.values():
            outbox.close(failed)
        deadline = time.monotonic() + 10
        while not failed and not all(inbox.ended for inbox in self._in) and time.monotonic() < deadline:
            self.mailbox.fetch_messages(0.1)
        for inbox in self._in:
            inbox.close()
        self.mailbox.close()
        self._out, self._in = {}, []
