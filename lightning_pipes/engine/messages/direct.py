"""Channels from GPU to GPU: gloo carries the headers of messages, another backend the tensors.

NCCL has no tags, checks no sizes and can't describe a received tensor, so a small header goes ahead through an ordinary
channel. The receiver posts its receives when it has the header with every shape. Both ends process one channel's
messages in the same order, as NCCL requires.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.utils import _pytree as pytree

from lightning_pipes.engine.messages.channel import RECEIVER, SENDER, Inbox, Outbox, Work, record_stream_use
from lightning_pipes.engine.messages.message import Message
from lightning_pipes.engine.private_torch import ProcessGroupGloo
from lightning_pipes.engine.watch.trust import Seal
from lightning_pipes.ir import Instruction

CPU = torch.device("cpu")


class Payload(Protocol):
    """The part of a two-rank group that is used here."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work: ...
    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work: ...


DirectGroup = Callable[[PrefixStore, int], Payload]
"""Creates one end, 0 or 1, of a group of two."""


def nccl_group(store: PrefixStore, end: int) -> Payload:
    """Return one end of an NCCL communicator of two ranks."""
    nccl: Any = dist.ProcessGroupNCCL  # absent from builds without NCCL
    group: Payload = nccl(store, end, 2, nccl.Options())
    return group


@dataclass(frozen=True)
class _TensorSpec:
    """Stands for a tensor in a header."""

    shape: torch.Size
    dtype: torch.dtype


class _Stream:
    """A stream of its own on a GPU; nothing on a CPU, where the same code is tested."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._user = (
            torch.cuda.current_stream(device) if on_gpu else None
        )  # of the thread that computes, which makes it

    def use_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def after_current(self) -> None:
        """Make later work on this stream wait for work enqueued on the current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def publish_tensors(self, tree: Any) -> None:
        """Wait for the work of this stream, and mark `tree` as used by the computing stream."""
        if self._stream is not None:
            self._stream.synchronize()
            record_stream_use(self._user, tree)


class DirectOutbox:
    """The sending end: sends the header and enqueues the tensors; a thread keeps them until they have left."""

    def __init__(
        self,
        headers: ProcessGroupGloo,
        payload: Payload,
        peer: int,
        device: torch.device,
        lost: Callable[[BaseException], None],
        seal: Seal | None,
    ) -> None:
        self._headers = Outbox(headers, peer, CPU, lost, seal)
        self._payload, self._lost = payload, lost
        self._stream = _Stream(device)
        self._leaving: SimpleQueue[list[tuple[Work, torch.Tensor]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._release, name=f"lightning_pipes send to {peer}", daemon=True)
        self._thread.start()

    def send(self, key: tuple[int, Instruction], tree: object, flags: tuple[bool, ...] = ()) -> None:
        """Start to send one message; messages arrive in the order of these calls."""
        leaves, spec = pytree.tree_flatten(tree)
        tensors = [leaf.contiguous() for leaf in leaves if isinstance(leaf, torch.Tensor)]
        described = [_TensorSpec(v.shape, v.dtype) if isinstance(v, torch.Tensor) else v for v in leaves]
        self._headers.send(key, pytree.tree_unflatten(described, spec), flags)
        self._stream.after_current()
        with self._stream.use_stream():
            self._leaving.put([(self._payload.send([t], RECEIVER, 0), t) for t in tensors if t.numel()])

    def close(self, failed: bool) -> None:
        self._leaving.put(None)
        self._thread.join(timeout=1.0 if failed else 10.0)
        self._headers.close(failed)

    def _release(self) -> None:
        try:
            while (leaving := self._leaving.get()) is not None:
                with self._stream.use_stream():
                    for work, _ in leaving:
                        work.wait()
                self._stream.synchronize()
                del leaving
        except Exception as error:
            self._lost(error)


class DirectInbox:
    """The receiving end: the thread that receives a header fetches its tensors."""

    def __init__(
        self,
        headers: ProcessGroupGloo,
        payload: Payload,
        peer: int,
        device: torch.device,
        deliver: Callable[[Message], None],
        lost: Callable[[BaseException], None],
        seal: Seal | None,
    ) -> None:
        self._payload, self._device, self._deliver = payload, device, deliver
        self._stream = _Stream(device)
        self._headers = Inbox(headers, peer, CPU, self._fetch, lost, seal)

    def close(self, failed: bool) -> None:
        self._headers.close(failed)

    def _fetch(self, header: Message) -> None:
        works: list[Work] = []

        def receive(described: _TensorSpec) -> torch.Tensor:
            tensor = torch.empty(described.shape, dtype=described.dtype, device=self._device)
            if tensor.numel():
                works.append(self._payload.recv([tensor], SENDER, 0))
            return tensor

        with self._stream.use_stream():
            tree = pytree.tree_map_only(_TensorSpec, receive, header.tree)
            for work in works:
                work.wait()
        self._stream.publish_tensors(tree)
        self._deliver(header._replace(tree=tree, arrived=time.monotonic_ns()))
