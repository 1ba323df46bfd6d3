"""Sends and receives messages in one direction between two ranks, over a dedicated gloo process group.

Gloo transfers bytes only after the receiver has posted a receive, and each message must fit into the posted buffer. The
receiver therefore posts several receives, called slots, in advance. Each piece that arrives also announces the size of
the slot that replaces it. A message that is larger than the posted slots is split into pieces. In a steady stream,
every message fits into one slot.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroupGloo
from torch.utils import _pytree as pytree

from lightning_pipes.engine.messages.message import (
    FRONT_BYTES,
    Decoder,
    Encoder,
    Message,
    Wire,
    pageable_bytes,
    pinned_bytes,
)
from lightning_pipes.engine.watch.trust import Seal
from lightning_pipes.ir import Instruction
from lightning_pipes.ir.clock import read_nanoseconds


def record_stream_use(stream: Any, tree: Any) -> None:
    """Record that `stream` uses the tensors of `tree`, which were allocated on another stream.

    The caching allocator then reuses their memory only after the work queued on `stream` has finished. Without this
    call, the allocating stream could reuse the memory as soon as Python drops the tensors, while queued kernels still
    read them.
    """
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            leaf.record_stream(stream)


class StageIn:
    """Copies the tensors of a tree to a device. On the CPU, the tensors are returned unchanged.

    The thread that runs the computation must create this object, because the stream that is current at that time is
    recorded as the user of the copied tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._user = torch.cuda.current_stream(device) if on_gpu else None

    def __call__(self, tree: Any) -> Any:
        """Copy the tensors of `tree` to the device, wait for the copies, and return the tree."""
        if self._stream is None:
            return tree
        with torch.cuda.stream(self._stream):
            there = pytree.tree_map_only(
                torch.Tensor, lambda t: t.pin_memory().to(self._device, non_blocking=True), tree
            )
        self._stream.synchronize()
        record_stream_use(self._user, there)
        return there


N_POSTED_RECEIVES = 4
"""Number of receives that are posted in advance. With fewer, steps took up to 1.9 times as long on slow links; more
did not help."""
FIRST_RECEIVE_BYTES = 4096
"""Size in bytes of the first receives, which are posted before the sizes of messages are known."""
RELEASE_SECONDS = 0.01
"""How long a sent tensor may be kept alive after its delivery, in seconds."""

# Bytes of the slot that replaces this one, bytes of the whole message, offset of this piece, bytes of this piece.
_PIECE_HEADER = struct.Struct("<q q q q")
_GOODBYE = -1
SENDER, RECEIVER = 0, 1
"""Ranks of the two ends within the process group of a channel."""


class Work(Protocol):
    """A send or receive in flight.

    Call `wait` exactly once, and never pass a timeout, because a timeout would close the connection. Dropping a send
    before it has finished loses the message.
    """

    def wait(self) -> bool: ...


class Outbox:
    """The sending end of a channel.

    `send` returns as soon as gloo has taken the bytes or, for tensors on a GPU, as soon as their copy is enqueued. A
    background thread keeps the tensors alive until they are delivered. The thread wakes up only from time to time,
    because waking it for each message would cost the computing thread more than sending the message.
    """

    def __init__(
        self,
        group: ProcessGroupGloo,
        peer: int,
        device: torch.device,
        lost: Callable[[BaseException], None],
        seal: Seal | None,
    ):
        self._group, self._lost = group, lost
        self._encoder = Encoder(pinned_bytes if device.type == "cuda" else pageable_bytes, seal=seal)
        self._slots = deque(
            [FIRST_RECEIVE_BYTES] * N_POSTED_RECEIVES
        )  # sizes of the receives that the peer has posted or will post next
        self._slot = FIRST_RECEIVE_BYTES
        self._stager = _StageOut(device, self._post, lost) if device.type == "cuda" else None
        self._unfinished: deque[tuple[Work, torch.Tensor, Wire | None]] = deque()
        self._has_work = threading.Event()
        self._flush_now = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._release, name=f"lightning_pipes send to {peer}", daemon=True)
        self._thread.start()

    def send(self, key: tuple[int, Instruction], tree: object, flags: tuple[bool, ...] = ()) -> None:
        """Start sending one message. Messages arrive in the order of the calls."""
        wire, tensors = self._encoder.encode(key, tree, flags, read_nanoseconds())
        if self._stager is None:
            wire.copy_tensors(tensors)
            self._post(wire)
        else:
            self._stager.send(wire, tensors)

    def close(self, failed: bool) -> None:
        """Send one end mark for each receive that the peer has posted, and wait until the marks are delivered.

        After a failure, no end marks are sent, and the wait is short.
        """
        if self._stager is not None:
            self._stager.close(failed)
        if not failed:
            for _ in range(N_POSTED_RECEIVES):
                empty = torch.empty(FRONT_BYTES, dtype=torch.uint8)
                self._post_piece(empty, empty.numpy().data, _GOODBYE, 0, None)
        self._closed = True
        self._has_work.set()
        self._flush_now.set()
        self._thread.join(timeout=1.0 if failed else 10.0)

    def _post(self, wire: Wire) -> None:
        buffer = wire.buffer
        size = buffer.numel() - FRONT_BYTES
        if buffer.numel() > self._slot:
            self._slot = -(-buffer.numel() // FIRST_RECEIVE_BYTES) * FIRST_RECEIVE_BYTES
        if buffer.numel() <= self._slots[0]:
            self._post_piece(buffer, wire.bytes, size, 0, wire)
            return
        at = 0
        while at < size:  # happens only until the peer has posted slots of the new size
            piece = buffer[at : at + self._slots[0]].clone()  # the first FRONT_BYTES of the piece are overwritten
            self._post_piece(piece, piece.numpy().data, size, at, None)
            at += piece.numel() - FRONT_BYTES

    def _post_piece(self, buffer: torch.Tensor, view: memoryview, size: int, offset: int, wire: Wire | None) -> None:
        self._slots.popleft()
        self._slots.append(self._slot)
        _PIECE_HEADER.pack_into(view, 0, self._slot, size, offset, len(view) - FRONT_BYTES)
        try:
            work: Work = self._group.send([buffer], RECEIVER, 0)  # type: ignore[attr-defined]
        except RuntimeError as error:
            self._lost(error)  # reports the lost peer and does not raise
            raise
        self._unfinished.append((work, buffer, wire))
        if not self._has_work.is_set():
            self._has_work.set()

    def _release(self) -> None:
        try:
            while self._has_work.wait():
                self._flush_now.wait(RELEASE_SECONDS)
                self._has_work.clear()
                while self._unfinished:
                    work, _, wire = self._unfinished[0]
                    work.wait()
                    self._unfinished.popleft()
                    if wire is not None:
                        self._encoder.release(wire)
                if self._closed:
                    return
        except Exception as error:
            self._lost(error)


class _StageOut:
    """Copies tensors from the GPU to pinned memory on a separate stream.

    Each message is posted after its copy has finished.
    """

    def __init__(
        self, device: torch.device, post: Callable[[Wire], None], lost: Callable[[BaseException], None]
    ) -> None:
        self._post, self._lost = post, lost
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="lightning_pipes copy from GPU", daemon=True)
        self._thread.start()

    def send(self, wire: Wire, tensors: Sequence[torch.Tensor]) -> None:
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        self._queue.put((wire, tensors, done))

    def close(self, failed: bool) -> None:
        self._queue.put(None)
        self._thread.join(timeout=1.0 if failed else 10.0)

    def _run(self) -> None:
        try:
            while (job := self._queue.get()) is not None:
                wire, tensors, done = job
                with torch.cuda.stream(self._stream):
                    self._stream.wait_event(done)
                    wire.copy_tensors(tensors)
                self._stream.synchronize()
                self._post(wire)
                del job, wire, tensors
        except Exception as error:
            self._lost(error)


class Inbox:
    """The receiving end of a channel.

    A thread waits for the posted receives in order, and delivers each message once it is complete.
    """

    def __init__(
        self,
        group: ProcessGroupGloo,
        peer: int,
        device: torch.device,
        deliver: Callable[[Message], None],
        lost: Callable[[BaseException], None],
        seal: Seal | None,
    ):
        self._group, self._peer = group, peer
        self._deliver, self._lost = deliver, lost
        self._decoder = Decoder(seal)
        self._stage_in = StageIn(device)
        self._posted: deque[tuple[Work, torch.Tensor, int]] = deque()
        for _ in range(N_POSTED_RECEIVES):
            self._post(FIRST_RECEIVE_BYTES)
        self._thread = threading.Thread(target=self._run, name=f"lightning_pipes receive from {peer}", daemon=True)
        self._thread.start()

    def close(self, failed: bool) -> None:
        """Wait until the peer has closed its end. After a failure, wait for one second at most."""
        self._thread.join(timeout=1.0 if failed else 10.0)

    def _post(self, size: int) -> None:
        buffer = torch.empty(size, dtype=torch.uint8)
        work: Work = self._group.recv([buffer], SENDER, 0)  # type: ignore[attr-defined]
        self._posted.append((work, buffer, read_nanoseconds()))

    def _run(self) -> None:
        whole: torch.Tensor | None = None
        try:
            while self._posted:
                work, buffer, posted = self._posted.popleft()
                work.wait()
                arrived = read_nanoseconds()
                successor, size, offset, piece = _PIECE_HEADER.unpack_from(buffer.numpy().data, 0)
                if size == _GOODBYE:  # each of the other posted receives gets an end mark too
                    continue
                if piece < size:
                    if offset == 0:
                        whole = torch.empty(FRONT_BYTES + size, dtype=torch.uint8)
                    assert whole is not None
                    start = FRONT_BYTES + offset
                    whole[start : start + piece] = buffer[FRONT_BYTES : FRONT_BYTES + piece]
                    if offset + piece < size:
                        self._post(successor)
                        continue
                    buffer, whole = whole, None
                message = self._decoder.decode(buffer, posted, arrived)
                self._deliver(message._replace(tree=self._stage_in(message.tree)))
                del message
                del buffer
                # Deliver first: the rank may be waiting for this message, and three more receives are still posted.
                self._post(successor)
        except Exception as error:
            self._lost(error)
