"""One direction between two ranks, for one purpose, over its own process group.

Gloo moves bytes only after the receiver has posted a receive, and a message must fit the posted buffer. So receives are
posted ahead, in slots. Each arriving piece announces the size of the slot posted in its place. A message larger than
the posted slots is cut into pieces. A steady stream takes one slot a message.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

import torch
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
from lightning_pipes.engine.private_torch import ProcessGroupGloo
from lightning_pipes.engine.watch.trust import Seal
from lightning_pipes.ir import Instruction
from lightning_pipes.ir.clock import read_nanoseconds


def record_stream_use(stream: Any, tree: Any) -> None:
    """Register `stream` as a user of the tensors of `tree`, which another stream created.

    The allocator then reuses their memory only after `stream` is done. Otherwise the creating stream could reuse it as
    soon as Python drops them, while queued kernels still read them.
    """
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            leaf.record_stream(stream)


class StageIn:
    """Copies trees of tensors to a device; on the CPU they stay unchanged.

    The computing thread must create it: its stream is the one that will use them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._user = torch.cuda.current_stream(device) if on_gpu else None

    def __call__(self, tree: Any) -> Any:
        """Return `tree` with its tensors on the device, after their arrival."""
        if self._stream is None:
            return tree
        with torch.cuda.stream(self._stream):
            there = pytree.tree_map_only(
                torch.Tensor, lambda t: t.pin_memory().to(self._device, non_blocking=True), tree
            )
        self._stream.synchronize()
        record_stream_use(self._user, there)
        return there


POSTED = 4
"""Receives posted ahead. Fewer cost up to 1.9 times the step time on slow links, more gain nothing."""
FIRST_SLOT = 4096
"""Bytes of the first receives, while the sizes of messages are unknown."""
RELEASE_SECONDS = 0.01
"""How long a sent tensor may be kept after it was delivered."""

_PIECE = struct.Struct("<q q q q")  # bytes of this slot's successor, of the whole message, offset, bytes in this piece
_GOODBYE = -1
SENDER, RECEIVER = 0, 1
"""The two ranks of a channel's group."""


class Work(Protocol):
    """A send or receive in flight. Call `wait` exactly once, and never with a timeout, which would close the
    connection. Dropping an unfinished send loses the message."""

    def wait(self) -> bool: ...


class Outbox:
    """The sending end.

    `send` returns once gloo has the bytes, or for tensors on a GPU once their copy is enqueued. A thread keeps them
    alive until delivery. It wakes only now and then, because a wake-up for each message would cost the computing thread
    more than the message itself.
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
        self._slots = deque([FIRST_SLOT] * POSTED)  # sizes of the receives that the peer has posted, or will next
        self._slot = FIRST_SLOT
        self._stager = _StageOut(device, self._post, lost) if device.type == "cuda" else None
        self._unfinished: deque[tuple[Work, torch.Tensor, Wire | None]] = deque()
        self._has_work = threading.Event()
        self._flush_now = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._release, name=f"lightning_pipes send to {peer}", daemon=True)
        self._thread.start()

    def send(self, key: tuple[int, Instruction], tree: object, flags: tuple[bool, ...] = ()) -> None:
        """Start to send one message; messages arrive in the order of these calls."""
        wire, tensors = self._encoder.encode(key, tree, flags, read_nanoseconds())
        if self._stager is None:
            wire.copy_tensors(tensors)
            self._post(wire)
        else:
            self._stager.send(wire, tensors)

    def close(self, failed: bool) -> None:
        """Send an end mark for each receive that the peer has posted, and wait for delivery."""
        if self._stager is not None:
            self._stager.close(failed)
        if not failed:
            for _ in range(POSTED):
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
            self._slot = -(-buffer.numel() // FIRST_SLOT) * FIRST_SLOT
        if buffer.numel() <= self._slots[0]:
            self._post_piece(buffer, wire.bytes, size, 0, wire)
            return
        at = 0
        while at < size:  # only while the peer's slots are still too small
            piece = buffer[at : at + self._slots[0]].clone()  # its first FRONT_BYTES are overwritten
            self._post_piece(piece, piece.numpy().data, size, at, None)
            at += piece.numel() - FRONT_BYTES

    def _post_piece(self, buffer: torch.Tensor, view: memoryview, size: int, offset: int, wire: Wire | None) -> None:
        self._slots.popleft()
        self._slots.append(self._slot)
        _PIECE.pack_into(view, 0, self._slot, size, offset, len(view) - FRONT_BYTES)
        try:
            work: Work = self._group.send([buffer], RECEIVER, 0)  # type: ignore[attr-defined]
        except RuntimeError as error:
            self._lost(error)  # reports the lost peer; raises nothing
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
    """Copies tensors from the GPU to pinned memory on a stream of its own, and posts them when the copy has ended."""

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
    """The receiving end: a thread waits for each posted receive in turn and delivers whole messages."""

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
        for _ in range(POSTED):
            self._post(FIRST_SLOT)
        self._thread = threading.Thread(target=self._run, name=f"lightning_pipes receive from {peer}", daemon=True)
        self._thread.start()

    def close(self, failed: bool) -> None:
        """Wait until the peer has closed its end too, or for a while after a failure."""
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
                successor, size, offset, piece = _PIECE.unpack_from(buffer.numpy().data, 0)
                if size == _GOODBYE:  # the other posted receives get one each
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
                self._post(successor)  # after delivery: three more are posted, and the rank may wait for this message
        except Exception as error:
            self._lost(error)
