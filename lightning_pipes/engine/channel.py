"""One direction between two ranks, for one purpose, over its own process group.

Bytes move on gloo only once the receiver has posted a receive, and a message must fit the posted buffer. So receives
are posted ahead, in slots: each piece that arrives announces how large the slot is that is posted in its place, and a
message too large for the slots on their way is cut into pieces. A steady stream takes one slot a message.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from lightning_pipes.engine.message import FRONT_BYTES, Decoder, Encoder, Message, fill, is_tensor
from lightning_pipes.ir import Instruction

POSTED = 4
"""Receives posted ahead. Fewer cost up to 1.9 times the step time on slow links, more gain nothing."""
FIRST_SLOT = 4096

_PIECE = struct.Struct("<q q q q")  # bytes of this slot's successor, of the whole message, offset, bytes in this piece
_GOODBYE = -1
SENDER, RECEIVER = 0, 1
"""The two ranks of a channel's group."""


class Work(Protocol):
    """A send or receive under way. `wait` must be called exactly once, and never with a timeout: it would close the
    connection. Dropping an unfinished send loses the message."""

    def wait(self) -> bool: ...


class Group(Protocol):
    """What is used of a gloo group of two ranks."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work: ...
    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work: ...


Posted = tuple[Work, torch.Tensor]
"""A send or receive under way and its bytes, which must live as long."""


class Outbox:
    """The sending end.

    `send` returns once the bytes are handed over to gloo, or for tensors on a GPU once their copy is enqueued; a
    thread keeps them alive until they are delivered.
    """

    def __init__(self, group: Group, peer: int, device: torch.device, lost: Callable[[BaseException], None]):
        self._group, self._peer, self._lost = group, peer, lost
        self._encoder = Encoder()
        self._slots = deque([FIRST_SLOT] * POSTED)  # sizes of the receives that the peer posts next
        self._slot = FIRST_SLOT
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None  # type: ignore[no-untyped-call]
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._idle = threading.Condition()
        self._unsent = 0
        self._thread = threading.Thread(target=self._deliver, name=f"lightning_pipes send to {peer}", daemon=True)
        self._thread.start()

    def send(self, key: tuple[int, Instruction], tree: object, flags: tuple[bool, ...] = ()) -> None:
        """Starts to send one message; messages arrive in the order of these calls."""
        buffer, tensors, places = self._encoder.encode(key, tree, flags, time.monotonic_ns())
        with self._idle:
            self._unsent += 1
        if self._cuda:
            buffer = buffer.pin_memory()
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
            self._queue.put((buffer, tensors, places, done))
        else:
            fill(buffer, tensors, places)
            self._queue.put((self._post(buffer),))

    def flush(self) -> None:
        """Returns once the peer's side has taken everything."""
        with self._idle:
            self._idle.wait_for(lambda: self._unsent == 0)

    def close(self, failed: bool) -> None:
        """Tells the peer that nothing more comes, once for each receive that it has posted."""
        if not failed:
            self.flush()
            self._queue.put(
                ([self._post_piece(torch.empty(FRONT_BYTES, dtype=torch.uint8), _GOODBYE, 0) for _ in range(POSTED)],)
            )
        self._queue.put(None)
        self._thread.join(timeout=1.0 if failed else 10.0)

    def _post(self, buffer: torch.Tensor) -> list[Posted]:
        size = buffer.numel() - FRONT_BYTES
        self._slot = max(self._slot, -(-buffer.numel() // FIRST_SLOT) * FIRST_SLOT)
        room = self._slots[0] - FRONT_BYTES
        works = [self._post_piece(buffer[: FRONT_BYTES + room], size, 0)]
        at = room
        while at < size:  # only while the peer's slots are still too small
            room = self._slots[0] - FRONT_BYTES
            piece = torch.empty(FRONT_BYTES + min(room, size - at), dtype=torch.uint8)
            piece[FRONT_BYTES:] = buffer[FRONT_BYTES + at : FRONT_BYTES + at + room]
            works.append(self._post_piece(piece, size, at))
            at += room
        return works

    def _post_piece(self, wire: torch.Tensor, size: int, offset: int) -> Posted:
        self._slots.popleft()
        self._slots.append(self._slot)
        _PIECE.pack_into(wire.numpy().data, 0, self._slot, size, offset, wire.numel() - FRONT_BYTES)
        return self._group.send([wire], RECEIVER, 0), wire

    def _deliver(self) -> None:
        try:
            while (job := self._queue.get()) is not None:
                if len(job) == 1:
                    works = job[0]
                else:
                    works = self._stage_out(*job)
                for work, _ in works:
                    work.wait()
                del job, works
                with self._idle:
                    self._unsent -= 1
                    self._idle.notify_all()
        except Exception as error:
            self._lost(error)
        finally:
            with self._idle:
                self._unsent = 0
                self._idle.notify_all()

    def _stage_out(
        self, buffer: torch.Tensor, tensors: list[torch.Tensor], places: list[int], done: torch.cuda.Event
    ) -> list[Posted]:
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(done)
            fill(buffer, tensors, places)
        self._stream.synchronize()
        return self._post(buffer)


class Inbox:
    """The receiving end: a thread that waits for each posted receive in turn and delivers whole messages."""

    def __init__(
        self,
        group: Group,
        peer: int,
        device: torch.device,
        deliver: Callable[[Message], None],
        lost: Callable[[BaseException], None],
    ):
        self._group, self._peer, self._device = group, peer, device
        self._deliver, self._lost = deliver, lost
        self._decoder = Decoder()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._posted: deque[tuple[Work, torch.Tensor, int]] = deque()
        for _ in range(POSTED):
            self._post(FIRST_SLOT)
        self._thread = threading.Thread(target=self._run, name=f"lightning_pipes receive from {peer}", daemon=True)
        self._thread.start()

    def close(self, failed: bool) -> None:
        """Returns when the peer has closed its end too, or after a while where something failed."""
        self._thread.join(timeout=1.0 if failed else 10.0)

    def _post(self, size: int) -> None:
        buffer = torch.empty(size, dtype=torch.uint8)
        self._posted.append((self._group.recv([buffer], SENDER, 0), buffer, time.monotonic_ns()))

    def _run(self) -> None:
        whole: torch.Tensor | None = None
        try:
            while self._posted:
                work, buffer, posted = self._posted.popleft()
                work.wait()
                arrived = time.monotonic_ns()
                successor, size, offset, piece = _PIECE.unpack_from(buffer.numpy().data, 0)
                if size == _GOODBYE:  # the other posted receives get one each
                    continue
                self._post(successor)
                if piece < size:
                    if offset == 0:
                        whole = torch.empty(FRONT_BYTES + size, dtype=torch.uint8)
                    assert whole is not None
                    start = FRONT_BYTES + offset
                    whole[start : start + piece] = buffer[FRONT_BYTES : FRONT_BYTES + piece]
                    if offset + piece < size:
                        continue
                    buffer, whole = whole, None
                self._deliver(self._stage_in(self._decoder.decode(buffer, posted, arrived)))
                del buffer
        except Exception as error:
            self._lost(error)

    def _stage_in(self, message: Message) -> Message:
        if self._stream is None:
            return message
        with torch.cuda.stream(self._stream):
            tree = pytree.tree_map(
                lambda leaf: leaf.pin_memory().to(self._device, non_blocking=True) if is_tensor(leaf) else leaf,
                message.tree,
            )
        self._stream.synchronize()
        return replace(message, tree=tree)
