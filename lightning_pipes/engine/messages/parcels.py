"""Keyed tensors from any rank to any rank, in chunks, behind training traffic: for moves, mirrors and versions.

    sender      wait until nothing of ours waits for the network   chunk -->            wait   chunk -->
    receiver                                                             <-- it is here              <-- it is here

Chunks go on a group that only these two know, and only in that direction; the next one is packed while one travels. At
most one is under way from a rank to another, so that a message of training that comes next waits for one chunk at most.
With `priority` as many are as queue without end (DynPipe, S V-C3), for the network lets training pass.

A pair of ranks is connected when one sends and the other expects for the first time; a thread at each end waits for
that, and nobody else.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from lightning_pipes.engine.messages.channel import RECEIVER, SENDER
from lightning_pipes.engine.messages.parcel_chunks import MOST, MOST_UNDER_WAY, Line, Pace, Packing, queue_limit
from lightning_pipes.engine.messages.parcel_format import content_of, described, packed
from lightning_pipes.engine.messages.socket_queues import Load, SocketQueues, marked_as_bulk
from lightning_pipes.engine.messages.staging import StageIn
from lightning_pipes.engine.messages.transport import IDLE
from lightning_pipes.engine.private_torch import ProcessGroupGloo
from lightning_pipes.engine.watch.failure import FailureWatch
from lightning_pipes.ir import InputError, PipelineError

Key = str | int | tuple[Any, ...]
"""Names a parcel: a text, a number, or a tuple of these."""

PATIENCE = 0.1
"""Seconds after which a chunk leaves although training has messages waiting: slow, and never stuck."""
LOOK_SECONDS = 0.001
CLOSE_SECONDS = 10.0
_CHUNK = struct.Struct("<8s q q q q q")  # magic, parcel, bytes of its description, bytes in all, first byte, and last
_MAGIC = b"LPARC01\0"
_FRONT = 64
_HELLO, _GOODBYE = -1, -2
_HELLOS = 3
_DATA, _ARRIVED = 0, 1
"""Tags of a group's two directions."""


class Handle:
    """One parcel on its way, at either end.

    Attributes:
        what: what it is, for messages.
        size: bytes of its tensors and what describes them; of an expected one, 0 until it is there.
        seconds: from the call that made the handle until it was done.
    """

    def __init__(
        self, what: str, watch: FailureWatch, changed: threading.Condition, told: Callable[[], None] | None = None
    ) -> None:
        self.what = what
        self.size = 0
        self.seconds = 0.0
        self._watch, self._changed, self._told = watch, changed, told
        self._begun = time.monotonic()
        self._done = False
        self._content: Any = None

    def __str__(self) -> str:
        return self.what

    def done(self) -> bool:
        """Whether it has arrived.

        Raises:
            PeerFailure: a rank has failed before.
        """
        if not self._done:
            self._watch.check()
        return self._done

    def wait(self) -> Handle:
        """Returns itself when the parcel has arrived.

        Raises:
            PeerFailure: a rank has failed before.
        """
        doing, self._watch.doing = self._watch.doing, self
        try:
            with self._changed:
                while not self.done():
                    self._changed.wait(timeout=1.0)  # bounded, to let Ctrl-C in
        finally:
            self._watch.doing = doing
        return self

    @property
    def content(self) -> Any:
        """The content that was sent, at the receiver; waits for it. Each tensor lies in memory of its own."""
        return self.wait()._content

    def finish(self, size: int, content: Any = None) -> None:
        """It has arrived."""
        with self._changed:
            self.size, self.seconds, self._content = size, time.monotonic() - self._begun, content
            self._done = True
            self._changed.notify_all()
        if self._told is not None:
            self._told()


@dataclass
class Traffic:
    """The cost of parcels so far.

    Attributes:
        sent, received: bytes, with what describes them.
        sending: seconds in which chunks of this rank were under way.
        held_back: seconds in which one was ready and let training go first.
    """

    sent: int = 0
    received: int = 0
    sending: float = 0.0
    held_back: float = 0.0


class Parcels:
    """One rank's post office.

    All ranks make theirs equally often and in one order, though not at one moment; that alone connects nobody.

    Args:
        rank: the global rank of this process.
        ranks: the global ranks among which parcels go.
        device: where what arrives is put; the CPU by default.
        priority: mark the connections as less urgent than all others, by SO_PRIORITY, instead of letting chunks wait
            for training. It needs a queue in front of the network that goes by it, which root installs, on all hosts:
            `tc qdisc replace dev eth0 root pfifo_fast`, or `prio`, or below a class that shapes.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        watch: FailureWatch,
        device: torch.device | None = None,
        priority: bool = False,
    ) -> None:
        self.traffic = Traffic()
        self.rank, self.watch = rank, watch
        self.device = device or torch.device("cpu")
        self.stage_in = StageIn(self.device)
        self.closing = threading.Event()
        self.changed = threading.Condition()
        self._ranks = frozenset(ranks)
        self._connection = watch.store_later()
        self._stores: list[Any] = []  # of groups: torch keeps only its own half of ours
        self._priority, self._load = priority, Load()
        self._busy: Callable[[], bool] = (lambda: False) if priority else SocketQueues().busy
        self._out: dict[int, _Outgoing] = {}
        self._in: dict[int, _Incoming] = {}
        self._arrived: dict[tuple[int, Key], deque[tuple[int, Any]]] = defaultdict(deque)
        self._expected: dict[tuple[int, Key], deque[Handle]] = defaultdict(deque)
        watch.on_failure(self._failed)

    def gate(self, busy: Callable[[], bool]) -> None:
        """Chunks leave from now on when `busy()` is false, and every PATIENCE seconds when it is not. By default they
        wait while any TCP connection of this process has bytes that are not delivered. It is called by other threads,
        and often."""
        self._busy = busy

    def send(self, to: int, key: Key, content: Any) -> Handle:
        """Starts to send `content`: dicts, lists and tuples of tensors, numbers, texts and None.

        Tensors are read until the handle is done; give copies of what changes before. Of parcels that are sent to one
        rank, whatever has least left goes first; equal keys arrive in the order of these calls.

        Raises:
            InputError: no such rank, or something that a parcel can't carry.
            PeerFailure: a rank has failed.
        """
        self._check(to)
        handle = Handle(f"parcel {key!r} to {self.watch.name(to)} to arrive", self.watch, self.changed)
        description, tensors = packed([self._checked(key), content])
        if to == self.rank:
            copies = iter([t.detach().to(self.device, copy=True) for t in tensors])
            skeleton, _ = described(description)
            _, own = content_of(skeleton, copies)
            self.deliver(self.rank, key, sum(t.nbytes for t in tensors) + len(description), own)
            handle.finish(sum(t.nbytes for t in tensors) + len(description))
            return handle
        if to not in self._out:
            self._out[to] = _Outgoing(self, to)
        self._out[to].add(_Leaving(handle, key, description, tensors))
        return handle

    def expect(self, source: int, key: Key, told: Callable[[], None] | None = None) -> Handle:
        """Gives what `source` sends, or has sent, by that key.

        Args:
            told: called when it is here, on the thread that has received it: to be short.

        Raises:
            InputError: no such rank.
            PeerFailure: a rank has failed.
        """
        self._check(source)
        handle = Handle(f"parcel {key!r} from {self.watch.name(source)}", self.watch, self.changed, told)
        with self.changed:
            here = self._arrived.get((source, self._checked(key)))
            if here:
                size, content = here.popleft()
                if not here:
                    del self._arrived[source, key]
                handle.finish(size, content)
            else:
                self._expected[source, key].append(handle)
        if source != self.rank and source not in self._in:
            self._in[source] = _Incoming(self, source)
        return handle

    def close(self) -> None:
        """Ends all connections when what was sent has arrived; both ends must call it.

        Raises:
            PipelineError: a parcel was sent to a rank that never expected one.
        """
        self.closing.set()
        with self.changed:
            self.changed.notify_all()
        failed = self.watch.error is not None
        until = time.monotonic() + (1.0 if failed else CLOSE_SECONDS)
        for end in self._ends:
            end.join(until)
        if not failed:
            self._part()
        left = [str(h) for out in self._out.values() for h in out.left]
        self._out, self._in = {}, {}
        if left and self.watch.error is None:
            raise PipelineError(
                f"rank {self.rank} closes its parcels, and still waits for {', '.join(left)}; every parcel has to be "
                "expected by the rank that it is sent to, before either closes"
            )

    def deliver(self, source: int, key: Key, size: int, content: Any) -> None:
        """A parcel has arrived."""
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

    def broken(self, peer: int, error: Exception) -> None:
        """A connection to `peer` has ended by `error`: gloo's, which means that the peer has gone, or our own."""
        if isinstance(error, RuntimeError) and not isinstance(error, PipelineError):
            self.watch.lost(peer, error)
        else:
            self.watch.fail(error, f"its parcels from or to rank {peer}")

    def hold_back(self) -> None:
        """Returns when a chunk may leave."""
        begun = now = time.monotonic()
        while now < begun + PATIENCE and self._busy() and self.watch.error is None:
            time.sleep(LOOK_SECONDS)
            now = time.monotonic()
        with self.changed:
            self.traffic.held_back += now - begun

    def connect(self, source: int, destination: int) -> ProcessGroupGloo | None:
        """The group of that direction, when both ends want it; None if that did not come to pass before `close`.

        Each end says that it is there, and begins to make the group when the other has said so too: it would block
        until then.
        """
        store, mine = self._connection(), int(self.rank == destination)
        self._stores.append(store)
        store.set(f"{source}-{destination}/{mine}", "")
        pause = LOOK_SECONDS
        while not store.check([f"{source}-{destination}/{1 - mine}"]):
            if self.closing.wait(pause) or self.watch.error is not None:
                return None
            pause = min(2 * pause, 0.05)
        with marked_as_bulk() if self._priority else nullcontext():
            return ProcessGroupGloo(PrefixStore(f"{source}-{destination}/group", store), mine, 2, IDLE)

    def limit(self, pace: Pace, packing: float) -> int:
        """How many chunks may be under way to a rank, where packing one takes so many seconds."""
        if not self._priority:
            return 1
        size = pace.size
        return min(MOST_UNDER_WAY, queue_limit(self._load.rate() / size, 1 / max(packing, 1e-9), pace.best / size))

    def _check(self, rank: int) -> None:
        if rank not in self._ranks:
            raise InputError(f"there is no rank {rank} to exchange parcels with; there are {sorted(self._ranks)}")
        self.watch.check()

    def _checked(self, key: Key) -> Key:
        if not isinstance(key, str | int | tuple):
            raise InputError(f"a parcel's key is a text, a number or a tuple of these, not {key!r}")
        return key

    def _failed(self, error: BaseException) -> None:
        with self.changed:
            self.changed.notify_all()

    @property
    def _ends(self) -> list[_Outgoing | _Incoming]:
        return [*self._out.values(), *self._in.values()]

    def _part(self) -> None:
        """Waits until all who were connected have read everything too: see `GlooTransport`."""
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
                time.sleep(LOOK_SECONDS)


class _Leaving:
    """A parcel that is sent, as bytes."""

    def __init__(self, handle: Handle, key: Key, description: bytes, tensors: Sequence[torch.Tensor]) -> None:
        self.handle, self.description, self._tensors = handle, description, tensors
        self._layout = Packing([len(description), *(t.nbytes for t in tensors)])
        self.size = len(description) + sum(t.nbytes for t in tensors)
        self._part, self._bytes = 0, torch.frombuffer(bytearray(description), dtype=torch.uint8)
        self._ready: Any = None
        if any(t.device.type == "cuda" for t in tensors):
            self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._ready.record()

    def copy(self, start: int, stop: int, into: torch.Tensor) -> None:
        """Writes those bytes."""
        at = 0
        for part, first, last in self._layout.pieces(start, stop):
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
    """A chunk under way, with whose bytes it is.

    Attributes:
        work: its sending, and the peer's word that it is there.
    """

    number: int
    start: int
    stop: int
    begun: float
    work: tuple[Any, Any, Any]


class _Outgoing:
    """The sending end of one direction between two ranks."""

    def __init__(self, parcels: Parcels, peer: int) -> None:
        self.peer = peer
        self.connected = False
        self._parcels = parcels
        self._line, self._pace, self._count = Line(), Pace(), 0
        self._leaving: dict[int, _Leaving] = {}
        self._under_way: deque[_Chunk] = deque()
        self._quickest = 0.0  # seconds of a chunk without content
        self._last = 0.0  # when the last one was there
        self._thread = threading.Thread(target=self._run, name=f"lightning_pipes parcels to {peer}", daemon=True)
        self._thread.start()

    @property
    def left(self) -> list[Handle]:
        """Those that have not arrived."""
        return [leaving.handle for leaving in self._leaving.values()]

    def add(self, leaving: _Leaving) -> None:
        """One more parcel."""
        with self._parcels.changed:
            self._leaving[self._count] = leaving
            self._line.add(self._count, leaving.size)
            self._count += 1
            self._parcels.changed.notify_all()

    def join(self, until: float) -> None:
        """Returns when all is over, or at that time of the monotonic clock."""
        self._thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        parcels = self._parcels
        try:
            group = parcels.connect(parcels.rank, self.peer)
            if group is None:
                return
            self.connected = True
            buffers = deque(torch.empty(_FRONT + MOST, dtype=torch.uint8) for _ in range(MOST_UNDER_WAY + 1))
            self._quickest = min(self._exchange(group, buffers[0], _HELLO) for _ in range(_HELLOS))
            while self._some():
                with parcels.changed:
                    number, start, stop = self._line.next(self._pace.size)
                leaving, begun = self._leaving[number], time.monotonic()
                leaving.copy(start, stop, buffers[0][_FRONT:])  # while what is before it travels
                packed = time.monotonic() - begun
                while len(self._under_way) >= parcels.limit(self._pace, packed):
                    self._arrived()
                parcels.hold_back()
                self._start(group, buffers[0], number, len(leaving.description), leaving.size, start, stop)
                buffers.rotate(1)
            while self._under_way:
                self._arrived()
            if parcels.watch.error is None:
                for _ in range(MOST_UNDER_WAY):  # one for each receive that the peer has posted
                    self._exchange(group, buffers[0], _GOODBYE)
        except Exception as error:
            parcels.broken(self.peer, error)

    def _some(self) -> bool:
        """Whether there is something to send, when that is known."""
        parcels = self._parcels
        while self._under_way and not self._line:
            self._arrived()
        with parcels.changed:
            while not self._line and not parcels.closing.is_set() and parcels.watch.error is None:
                parcels.changed.wait()
            return bool(self._line) and parcels.watch.error is None

    def _start(self, group: Any, buffer: torch.Tensor, number: int, *sizes: int) -> None:
        """A chunk leaves."""
        _CHUNK.pack_into(buffer.numpy().data, 0, _MAGIC, number, *sizes)
        answer = torch.empty(1, dtype=torch.uint8)
        arrived, (start, stop) = group.recv([answer], RECEIVER, _ARRIVED), sizes[2:]
        sent = group.send([buffer[: _FRONT + stop - start]], RECEIVER, _DATA)
        self._under_way.append(_Chunk(number, start, stop, time.monotonic(), (sent, arrived, answer)))

    def _end(self) -> float:
        """Seconds that the oldest chunk under way has taken, when it is there: from its start, or from when the one
        before it was there."""
        chunk = self._under_way[0]
        sent, arrived, _ = chunk.work
        sent.wait()
        arrived.wait()
        self._under_way.popleft()
        before, self._last = self._last, time.monotonic()
        return self._last - max(before, chunk.begun)

    def _exchange(self, group: Any, buffer: torch.Tensor, number: int) -> float:
        """Seconds of a chunk without content."""
        self._start(group, buffer, number, 0, 0, 0, 0)
        return self._end()

    def _arrived(self) -> None:
        """Waits until the oldest chunk under way is there."""
        parcels, chunk = self._parcels, self._under_way[0]
        took = self._end()
        self._pace.took(chunk.stop - chunk.start, took - self._quickest)
        with parcels.changed:
            parcels.traffic.sent += chunk.stop - chunk.start
            parcels.traffic.sending += took
        leaving = self._leaving[chunk.number]
        if chunk.stop == leaving.size:
            del self._leaving[chunk.number]
            leaving.handle.finish(leaving.size)


class _Arriving:
    """A parcel that is received, as bytes."""

    def __init__(self, description: int, size: int) -> None:
        self._description = torch.empty(description, dtype=torch.uint8)
        self._size = size
        self._skeleton: Any = None
        self._tensors: list[torch.Tensor] = []
        self._parts: list[torch.Tensor] = [self._description]
        self._layout = Packing([description])

    def put(self, start: int, stop: int, data: torch.Tensor) -> None:
        """Those bytes have come; they come in order."""
        at = 0
        while start + at < stop:
            if self._skeleton is None and start + at >= self._description.numel():
                self._allocate()
            end = stop if self._skeleton is not None else min(stop, self._description.numel())
            for part, first, last in self._layout.pieces(start + at, end):
                self._parts[part][first:last] = data[at : at + last - first]
                at += last - first

    def content(self) -> Any:
        """Its content, all of which must be there."""
        if self._skeleton is None:
            self._allocate()
        return content_of(self._skeleton, iter(self._tensors))

    def _allocate(self) -> None:
        self._skeleton, found = described(self._description.numpy().tobytes())
        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in found]
        if self._description.numel() + sum(sizes) != self._size:
            raise PipelineError("received a parcel of another size than it says: do all ranks run the same version?")
        self._tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in found]
        self._parts += [t.reshape(-1).view(torch.uint8) if t.numel() else t for t in self._tensors]
        self._layout = Packing([self._description.numel(), *sizes])


class _Incoming:
    """The receiving end of one direction between two ranks."""

    def __init__(self, parcels: Parcels, peer: int) -> None:
        self.peer = peer
        self.connected = False
        self._parcels = parcels
        self._arriving: dict[int, _Arriving] = {}
        self._thread = threading.Thread(target=self._run, name=f"lightning_pipes parcels from {peer}", daemon=True)
        self._thread.start()

    def join(self, until: float) -> None:
        """Returns when the peer has closed its end too, or at that time of the monotonic clock."""
        self._thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        parcels = self._parcels
        try:
            group: Any = parcels.connect(self.peer, parcels.rank)
            if group is None:
                return
            self.connected = True
            here, number, left = torch.zeros(1, dtype=torch.uint8), _HELLO, MOST_UNDER_WAY
            posted = deque(self._posted(group) for _ in range(left))
            while left:
                buffer, work = posted.popleft()
                work.wait()
                magic, number, description, size, start, stop = _CHUNK.unpack_from(buffer.numpy().data, 0)
                if magic != _MAGIC:
                    raise PipelineError(f"received {magic!r} instead of a parcel: do all ranks run the same version?")
                whole = number >= 0 and self._take(buffer, number, description, size, start, stop)
                if number == _GOODBYE:
                    left -= 1
                else:
                    posted.append(self._posted(group, buffer))
                group.send([here], SENDER, _ARRIVED).wait()
                if whole:
                    self._deliver(number, size)
        except Exception as error:
            parcels.broken(self.peer, error)

    @staticmethod
    def _posted(group: Any, buffer: torch.Tensor | None = None) -> tuple[torch.Tensor, Any]:
        buffer = torch.empty(_FRONT + MOST, dtype=torch.uint8) if buffer is None else buffer
        return buffer, group.recv([buffer], SENDER, _DATA)

    def _take(self, buffer: torch.Tensor, number: int, description: int, size: int, start: int, stop: int) -> bool:
        """Whether the parcel is whole now."""
        if start == 0:
            self._arriving[number] = _Arriving(description, size)
        self._arriving[number].put(start, stop, buffer[_FRONT : _FRONT + stop - start])
        return stop == size

    def _deliver(self, number: int, size: int) -> None:
        parcels = self._parcels
        key, content = self._arriving.pop(number).content()
        parcels.deliver(self.peer, key, size, parcels.stage_in(content))
