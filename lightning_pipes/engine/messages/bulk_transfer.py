"""Keyed trees of tensors from any rank to any rank, in chunks that give way to messages of training.

    sender      wait until no message waits for the network   chunk -->            wait   chunk -->
    receiver                                                           <-- arrived              <-- arrived

Each pair of ranks has a process group for the chunks of each direction. The next chunk is packed while others travel.
If training leaves more of the link free, more and smaller chunks are in flight, so that the link does not idle
(DynPipe, S V-C3). A message of training waits for at most MAX_FLIGHT_SECONDS.

A pair of ranks connects when one of them sends and the other one receives for the first time. Only one thread at each
end waits for the connection.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

from lightning_pipes.engine import trees
from lightning_pipes.engine.messages.channel import RECEIVER, SENDER, StageIn
from lightning_pipes.engine.messages.chunks import (
    MAX_CHUNK_BYTES,
    MAX_IN_FLIGHT,
    ByteLayout,
    ChunkSizer,
    SendQueue,
    limit_queue,
)
from lightning_pipes.engine.messages.links import SocketQueues
from lightning_pipes.engine.messages.packed_trees import IncomingTree, TreeDescription, pack_tree
from lightning_pipes.engine.messages.transport import RECEIVE_TIMEOUT
from lightning_pipes.engine.watch.failure import FailureWatch
from lightning_pipes.ir import InputError, PipelineError

Key = str | int | tuple[Any, ...]
"""The key of a transfer: a text, a number, or a tuple of these."""

GATE_SECONDS = 0.1
"""Seconds after which a chunk leaves although messages of training wait, so that transfers never stall."""
CHUNK_POLL_SECONDS = 0.001
RATE_SECONDS = 0.1
"""Seconds over which the rates of training and of chunks are measured."""
CLOSE_SECONDS = 10.0
_CHUNK_HEADER = struct.Struct(
    "<8s q q q q q"
)  # magic, number of the tree, bytes of its description, bytes in all, first byte, and last
_MAGIC = b"LPARC02\0"
_CHUNK_HEADER_BYTES = 64
_MAX_CHUNK_OVERHEAD_BYTES = 256
"""The largest number of bytes that a chunk occupies in the network in addition to its content."""
_HELLO, _GOODBYE = -1, -2
_N_HELLOS = 3
_DATA, _ARRIVED = 0, 1
"""Tags of a group's two directions."""


class TransferHandle:
    """One tree in flight, at either end.

    Attributes:
        what: a description, for messages.
        size: bytes of its tensors and their description; at the receiver 0 until it has arrived.
        seconds: from the creation of the handle until it was done.
    """

    def __init__(
        self, what: str, watch: FailureWatch, changed: threading.Condition, on_arrival: Callable[[], None] | None = None
    ) -> None:
        self.what = what
        self.size = 0
        self.seconds = 0.0
        self._watch, self._changed, self._on_arrival = watch, changed, on_arrival
        self._begun = time.monotonic()
        self._done = False
        self._content: Any = None

    def __str__(self) -> str:
        return self.what

    def is_done(self) -> bool:
        """Return whether the tree has arrived.

        Raises:
            PeerFailure: a rank has failed before.
        """
        if not self._done:
            self._watch.check()
        return self._done

    def wait(self) -> TransferHandle:
        """Return itself when the tree has arrived.

        Raises:
            PeerFailure: a rank has failed before.
        """
        doing, self._watch.doing = self._watch.doing, self
        try:
            with self._changed:
                while not self.is_done():
                    self._changed.wait(timeout=1.0)  # bounded, to let Ctrl-C in
        finally:
            self._watch.doing = doing
        return self

    @property
    def content(self) -> Any:
        """The content that was sent, at the receiver; waits for it. Each tensor has memory of its own."""
        return self.wait()._content

    def finish(self, size: int, content: Any = None) -> None:
        """Mark the tree as arrived."""
        with self._changed:
            self.size, self.seconds, self._content = size, time.monotonic() - self._begun, content
            self._done = True
            self._changed.notify_all()
        if self._on_arrival is not None:
            self._on_arrival()


@dataclass
class TransferStatistics:
    """The cost of bulk transfers so far.

    Attributes:
        sent, received: bytes, including descriptions.
        sending: seconds in which chunks of this rank were in flight.
        held_back: seconds in which a chunk was ready and waited for training.
        most_in_flight: the largest number of chunks that were in flight to one rank.
    """

    sent: int = 0
    received: int = 0
    sending: float = 0.0
    held_back: float = 0.0
    most_in_flight: int = 0


class BulkTransfer:
    """One rank's end of all bulk transfers.

    All ranks must create their instances in the same order, but not at the same time. Creating one connects no ranks.

    Args:
        rank: the global rank of this process.
        ranks: the global ranks that exchange data.
        device: the device of received tensors; the CPU by default.

    Attributes:
        max_in_flight: chunks to a rank at a time, at most; MAX_IN_FLIGHT by default.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        watch: FailureWatch,
        device: torch.device | None = None,
    ) -> None:
        self.traffic = TransferStatistics()
        self.rank, self.watch = rank, watch
        self.device = device or torch.device("cpu")
        self.stage_in = StageIn(self.device)
        self.closing = threading.Event()
        self.changed = threading.Condition()
        self._ranks = frozenset(ranks)
        self._connection = watch.sub_store_factory()
        self._stores: list[Any] = []  # of groups: torch keeps only its own half of ours
        self._queues, self._outstanding = SocketQueues(), 0
        self._busy: Callable[[], bool] = self.is_training_sending
        self._training, self._counted = 0.0, (0, 0, 0.0)
        self.max_in_flight = MAX_IN_FLIGHT
        self._out: dict[int, _Sender] = {}
        self._in: dict[int, _Receiver] = {}
        self._arrived: dict[tuple[int, Key], deque[tuple[int, Any]]] = defaultdict(deque)
        self._expected: dict[tuple[int, Key], deque[TransferHandle]] = defaultdict(deque)
        watch.on_failure(self._on_failure)

    def set_gate(self, busy: Callable[[], bool]) -> None:
        """Send chunks from now on while `busy()` is false, and every GATE_SECONDS while it is true. By default they
        wait while TCP connections of this process have more undelivered bytes than chunks. Other threads call it
        often."""
        self._busy = busy

    def send(self, to: int, key: Key, content: Any) -> TransferHandle:
        """Start to send `content`, a tree of tensors and of objects that can be pickled.

        Tensors are read until the handle is done; give copies of tensors that change before. Of several trees to one
        rank, the one with the fewest bytes left goes first; equal keys arrive in the order of these calls.

        Raises:
            InputError: no such rank, or content that can't be sent.
            PeerFailure: a rank has failed.
        """
        self._check(to)
        handle = TransferHandle(f"bulk transfer {key!r} to {self.watch.name(to)} to arrive", self.watch, self.changed)
        description, tensors = pack_tree((self._check_key(key), content), self.watch.seal)
        if to == self.rank:
            copies = [t.detach().to(self.device, copy=True) for t in tensors]
            _, own = trees.close_objects(TreeDescription(description, self.watch.seal).fill(copies))
            self.add_arrived(self.rank, key, sum(t.nbytes for t in tensors) + len(description), own)
            handle.finish(sum(t.nbytes for t in tensors) + len(description))
            return handle
        if to not in self._out:
            self._out[to] = _Sender(self, to)
        self._out[to].add(_OutgoingTree(handle, description, tensors))
        return handle

    def receive(self, source: int, key: Key, on_arrival: Callable[[], None] | None = None) -> TransferHandle:
        """Return a handle of the tree that `source` sends, or has sent, under that key.

        Args:
            on_arrival: called when it has arrived, on the receiving thread; it must be short.

        Raises:
            InputError: no such rank.
            PeerFailure: a rank has failed.
        """
        self._check(source)
        handle = TransferHandle(
            f"bulk transfer {key!r} from {self.watch.name(source)}", self.watch, self.changed, on_arrival
        )
        with self.changed:
            here = self._arrived.get((source, self._check_key(key)))
            if here:
                size, content = here.popleft()
                if not here:
                    del self._arrived[source, key]
                handle.finish(size, content)
            else:
                self._expected[source, key].append(handle)
        if source != self.rank and source not in self._in:
            self._in[source] = _Receiver(self, source)
        return handle

    def close(self) -> None:
        """Close all connections when everything sent has arrived; both ends must call it.

        Raises:
            PipelineError: a tree was sent to a rank that never received it.
        """
        self.closing.set()
        with self.changed:
            self.changed.notify_all()
        failed = self.watch.error is not None
        until = time.monotonic() + (1.0 if failed else CLOSE_SECONDS)
        for end in self._ends:
            end.join(until)
        if not failed:
            self._wait_for_peers()
        left = [str(h) for out in self._out.values() for h in out.undelivered]
        self._out, self._in = {}, {}
        if left and self.watch.error is None:
            raise PipelineError(
                f"rank {self.rank} closes its bulk transfers, and still waits for {', '.join(left)}; every "
                "transfer has to be received by the rank that it is sent to, before either closes"
            )

    def add_arrived(self, source: int, key: Key, size: int, content: Any) -> None:
        """Hand an arrived tree to its handle, or keep it until it is requested."""
        with self.changed:
            self.traffic.received += size
            waiting = self._expected.get((source, key))
            if waiting:
                handle = waiting.popleft()
                if not waiting:
                    del self._expected[source, key]
                handle.finish(size, content)
            else:
                self._arrived[source, key].append((size, content))

    def report_broken(self, peer: int, error: Exception) -> None:
        """Report that a connection to `peer` has ended with `error`: gloo's error means that the peer has gone."""
        if isinstance(error, RuntimeError) and not isinstance(error, PipelineError):
            self.watch.report_lost_peer(peer, error)
        else:
            self.watch.report_failure(error, f"its bulk transfers from or to rank {peer}")

    def wait_for_gate(self) -> None:
        """Wait until a chunk may leave."""
        begun = now = time.monotonic()
        while now < begun + GATE_SECONDS and self._busy() and self.watch.error is None:
            time.sleep(CHUNK_POLL_SECONDS)
            now = time.monotonic()
        with self.changed:
            self.traffic.held_back += now - begun

    def is_training_sending(self) -> bool:
        """Return whether messages of training wait for the network."""
        return self._queues.unsent_bytes() > self._outstanding

    def count_in_flight(self, size: int, chunks: int) -> None:
        """Count the bytes of a chunk as it leaves, and with a minus as it arrives.

        Args:
            chunks: in flight to its rank, with it.
        """
        with self.changed:
            self._outstanding += size
            self.traffic.most_in_flight = max(self.traffic.most_in_flight, chunks)

    def limit_chunks(self, packing: float, service: float) -> int:
        """Return how many chunks may be in flight.

        Args:
            packing: bytes a second that chunks are packed with.
            service: bytes a second of the link.
        """
        now = time.monotonic()
        with self.changed:
            sent, own, before = self._counted
            if now - before >= RATE_SECONDS:
                in_all, bulk = self._queues.acknowledged_bytes(), self.traffic.sent
                self._training = max(0, in_all - sent - (bulk - own)) / (now - before) if before else 0.0
                self._counted = in_all, bulk, now
            return min(self.max_in_flight, limit_queue(self._training, packing, service))

    def connect(self, source: int, destination: int) -> ProcessGroupGloo | None:
        """Return the group of that direction once both ends want it; None if that does not happen before `close`.

        Each end announces itself, and creates the group only after the other's announcement, because creating it blocks
        until then.
        """
        store, mine = self._connection(), int(self.rank == destination)
        self._stores.append(store)
        store.set(f"{source}-{destination}/{mine}", "")
        pause = CHUNK_POLL_SECONDS
        while not store.check([f"{source}-{destination}/{1 - mine}"]):
            if self.closing.wait(pause) or self.watch.error is not None:
                return None
            pause = min(2 * pause, 0.05)
        return ProcessGroupGloo(PrefixStore(f"{source}-{destination}/group", store), mine, 2, RECEIVE_TIMEOUT)

    def _check(self, rank: int) -> None:
        if rank not in self._ranks:
            raise InputError(f"there is no rank {rank} to exchange data with; there are {sorted(self._ranks)}")
        self.watch.check()

    def _check_key(self, key: Key) -> Key:
        if not isinstance(key, str | int | tuple):
            raise InputError(f"a transfer's key is a text, a number or a tuple of these, not {key!r}")
        return key

    def _on_failure(self, error: BaseException) -> None:
        with self.changed:
            self.changed.notify_all()

    @property
    def _ends(self) -> list[_Sender | _Receiver]:
        return [*self._out.values(), *self._in.values()]

    def _wait_for_peers(self) -> None:
        """Wait until all connected peers have read everything too; see `GlooTransport`."""
        peers = sorted({end.peer for end in self._ends if end.connected})
        if not peers:
            return
        store = self._connection()
        for peer in peers:
            store.set(f"closed/{self.rank}-{peer}", "")
        until = time.monotonic() + CLOSE_SECONDS
        for peer in peers:
            while not store.check([f"closed/{peer}-{self.rank}"]):
                if self.watch.error is not None or time.monotonic() > until:
                    return
                time.sleep(CHUNK_POLL_SECONDS)


class _OutgoingTree:
    """A tree that is sent, as bytes."""

    def __init__(self, handle: TransferHandle, description: bytes, tensors: Sequence[torch.Tensor]) -> None:
        self.handle, self.description, self._tensors = handle, description, tensors
        self._layout = ByteLayout([len(description), *(t.nbytes for t in tensors)])
        self.size = len(description) + sum(t.nbytes for t in tensors)
        self._part, self._bytes = 0, torch.frombuffer(bytearray(description), dtype=torch.uint8)
        self._ready: Any = None
        if any(t.device.type == "cuda" for t in tensors):
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record()

    def copy(self, start: int, stop: int, into: torch.Tensor) -> None:
        """Write the bytes start to stop into `into`."""
        at = 0
        for part, first, last in self._layout.locate_bytes(start, stop):
            if part != self._part:  # one at a time, as they may have to be copied
                self._part, self._bytes = part, self._bytes_of(self._tensors[part - 1])
            into[at : at + last - first] = self._bytes[first:last]
            at += last - first

    def _bytes_of(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cuda":
            with torch.cuda.stream(torch.cuda.Stream(tensor.device)):  # type: ignore[no-untyped-call]
                self._ready.wait()
                tensor = tensor.detach().cpu()
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        return plain.reshape(-1).view(torch.uint8)


@dataclass
class _Chunk:
    """A chunk in flight, with the range of its bytes.

    Attributes:
        work: its send, and the peer's acknowledgement.
    """

    number: int
    start: int
    stop: int
    begun: float
    work: tuple[Any, Any, Any]


class _Sender:
    """The sending end of one direction between two ranks."""

    def __init__(self, transfer: BulkTransfer, peer: int) -> None:
        self.peer = peer
        self.connected = False
        self._transfer = transfer
        self._queue, self._sizer, self._count = SendQueue(), ChunkSizer(), 0
        self._trees: dict[int, _OutgoingTree] = {}
        self._in_flight: deque[_Chunk] = deque()
        self._quickest = 0.0  # seconds of a chunk without content
        self._packing = 0.0  # bytes a second
        self._last = 0.0  # when the last one was there
        self._thread = threading.Thread(target=self._run, name=f"lightning_pipes bulk transfer to {peer}", daemon=True)
        self._thread.start()

    @property
    def undelivered(self) -> list[TransferHandle]:
        """Handles of trees that have not arrived."""
        return [leaving.handle for leaving in self._trees.values()]

    def add(self, leaving: _OutgoingTree) -> None:
        """Add a tree to send."""
        with self._transfer.changed:
            self._trees[self._count] = leaving
            self._queue.add(self._count, leaving.size)
            self._count += 1
            self._transfer.changed.notify_all()

    def join(self, until: float) -> None:
        """Wait until all is delivered, or until that time of the monotonic clock."""
        self._thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        transfer = self._transfer
        try:
            group = transfer.connect(transfer.rank, self.peer)
            if group is None:
                return
            self.connected = True
            buffers = deque(
                torch.empty(_CHUNK_HEADER_BYTES + MAX_CHUNK_BYTES, dtype=torch.uint8) for _ in range(MAX_IN_FLIGHT + 1)
            )
            self._quickest = min(self._exchange(group, buffers[0], _HELLO) for _ in range(_N_HELLOS))
            while self._has_work():
                with transfer.changed:
                    number, start, stop = self._queue.next_chunk(self._sizer.size)
                leaving, begun = self._trees[number], time.monotonic()
                leaving.copy(start, stop, buffers[0][_CHUNK_HEADER_BYTES:])  # while what is before it travels
                self._packing = (stop - start) / max(1e-9, time.monotonic() - begun)
                while len(self._in_flight) >= min(self._sizer.limit, transfer.max_in_flight):
                    self._wait_for_oldest()
                transfer.wait_for_gate()
                self._start(group, buffers[0], number, len(leaving.description), leaving.size, start, stop)
                buffers.rotate(1)
            while self._in_flight:
                self._wait_for_oldest()
            if transfer.watch.error is None:
                for _ in range(MAX_IN_FLIGHT):  # one for each receive that the peer has posted
                    self._exchange(group, buffers[0], _GOODBYE)
        except Exception as error:
            transfer.report_broken(self.peer, error)

    def _has_work(self) -> bool:
        """Wait until it is known whether there is something to send, and return it."""
        transfer = self._transfer
        while self._in_flight and not self._queue:
            self._wait_for_oldest()
        with transfer.changed:
            while not self._queue and not transfer.closing.is_set() and transfer.watch.error is None:
                transfer.changed.wait()
            return bool(self._queue) and transfer.watch.error is None

    def _start(self, group: Any, buffer: torch.Tensor, number: int, *sizes: int) -> None:
        """Send a chunk."""
        _CHUNK_HEADER.pack_into(buffer.numpy().data, 0, _MAGIC, number, *sizes)
        answer = torch.empty(1, dtype=torch.uint8)
        arrived, (start, stop) = group.recv([answer], RECEIVER, _ARRIVED), sizes[2:]
        sent = group.send([buffer[: _CHUNK_HEADER_BYTES + stop - start]], RECEIVER, _DATA)
        self._in_flight.append(_Chunk(number, start, stop, time.monotonic(), (sent, arrived, answer)))
        self._transfer.count_in_flight(_MAX_CHUNK_OVERHEAD_BYTES + stop - start, len(self._in_flight))

    def _end(self) -> float:
        """Wait for the oldest chunk in flight, and return its seconds, from its start or from the arrival of the chunk
        before it."""
        chunk = self._in_flight[0]
        sent, arrived, _ = chunk.work
        sent.wait()
        arrived.wait()
        self._in_flight.popleft()
        self._transfer.count_in_flight(chunk.start - chunk.stop - _MAX_CHUNK_OVERHEAD_BYTES, 0)
        before, self._last = self._last, time.monotonic()
        return self._last - max(before, chunk.begun)

    def _exchange(self, group: Any, buffer: torch.Tensor, number: int) -> float:
        """Send a chunk without content, and return its seconds."""
        self._start(group, buffer, number, 0, 0, 0, 0)
        return self._end()

    def _wait_for_oldest(self) -> None:
        """Wait until the oldest chunk in flight has arrived."""
        transfer, chunk, before = self._transfer, self._in_flight[0], self._last
        took = self._end()
        trip = 0.0 if before > chunk.begun else self._quickest  # the next one's is hidden behind a chunk
        self._sizer.record_chunk(chunk.stop - chunk.start, took - min(trip, took / 2))
        self._sizer.set_limit(transfer.limit_chunks(self._packing, self._sizer.speed))
        with transfer.changed:
            transfer.traffic.sent += chunk.stop - chunk.start
            transfer.traffic.sending += took
        leaving = self._trees[chunk.number]
        if chunk.stop == leaving.size:
            del self._trees[chunk.number]
            leaving.handle.finish(leaving.size)


class _Receiver:
    """The receiving end of one direction between two ranks."""

    def __init__(self, transfer: BulkTransfer, peer: int) -> None:
        self.peer = peer
        self.connected = False
        self._transfer = transfer
        self._trees: dict[int, IncomingTree] = {}
        self._thread = threading.Thread(
            target=self._run, name=f"lightning_pipes bulk transfer from {peer}", daemon=True
        )
        self._thread.start()

    def join(self, until: float) -> None:
        """Wait until the peer has closed its end too, or until that time of the monotonic clock."""
        self._thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        transfer = self._transfer
        try:
            group: Any = transfer.connect(self.peer, transfer.rank)
            if group is None:
                return
            self.connected = True
            here, left = torch.zeros(1, dtype=torch.uint8), MAX_IN_FLIGHT
            posted = deque(self._posted(group) for _ in range(left))
            while left:
                buffer, work = posted.popleft()
                work.wait()
                magic, number, description, size, start, stop = _CHUNK_HEADER.unpack_from(buffer.numpy().data, 0)
                if magic != _MAGIC:
                    raise PipelineError(
                        f"received {magic!r} instead of a bulk transfer: do all ranks run the same version?"
                    )
                whole = number >= 0 and self._take(buffer, number, description, size, start, stop)
                if number == _GOODBYE:
                    left -= 1
                else:
                    posted.append(self._posted(group, buffer))
                group.send([here], SENDER, _ARRIVED).wait()
                if whole:
                    self._deliver(number, size)
        except Exception as error:
            transfer.report_broken(self.peer, error)

    @staticmethod
    def _posted(group: Any, buffer: torch.Tensor | None = None) -> tuple[torch.Tensor, Any]:
        buffer = torch.empty(_CHUNK_HEADER_BYTES + MAX_CHUNK_BYTES, dtype=torch.uint8) if buffer is None else buffer
        return buffer, group.recv([buffer], SENDER, _DATA)

    def _take(self, buffer: torch.Tensor, number: int, description: int, size: int, start: int, stop: int) -> bool:
        """Store a chunk, and return whether the tree is complete."""
        if start == 0:
            self._trees[number] = IncomingTree(description, size, self._transfer.watch.seal)
        self._trees[number].put(start, stop, buffer[_CHUNK_HEADER_BYTES : _CHUNK_HEADER_BYTES + stop - start])
        return stop == size

    def _deliver(self, number: int, size: int) -> None:
        transfer = self._transfer
        key, content = self._trees.pop(number).content()
        transfer.add_arrived(self.peer, key, size, trees.close_objects(transfer.stage_in(content)))
