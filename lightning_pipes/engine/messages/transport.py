"""All channels of one rank: over gloo, through shared memory of one host, or directly inside one process.

Channels from GPU to GPU: gloo carries the headers of messages, another backend the tensors.

NCCL has no tags, checks no sizes and can't describe a received tensor, so a small header goes ahead through an ordinary
channel. The receiver posts its receives when it has the header with every shape. Both ends process one channel's
messages in the same order, as NCCL requires.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.utils import _pytree as pytree

from lightning_pipes.engine.messages.channel import RECEIVER, SENDER, Inbox, Outbox, Work, record_stream_use
from lightning_pipes.engine.messages.local import LocalTransport, host_id
from lightning_pipes.engine.messages.mailbox import Key, Mailbox, Transport
from lightning_pipes.engine.messages.message import Decoder, Encoder, Message
from lightning_pipes.engine.private_torch import ProcessGroupGloo
from lightning_pipes.engine.watch.failure import FailureWatch
from lightning_pipes.engine.watch.fault_points import fault_point
from lightning_pipes.engine.watch.trust import Seal
from lightning_pipes.ir import InputError, Instruction, Kind, Plan, send_of
from lightning_pipes.ir.clock import read_nanoseconds

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
        self._deliver(header._replace(tree=tree, arrived=read_nanoseconds()))


IDLE = timedelta(days=30)
"""How long a posted receive may stay unanswered. A validation that does not use the pipeline may take hours, and the
failure watch notices dead ranks."""


class GlooTransport:
    """One channel per neighbour and direction, each over a gloo group of its own.

    The groups are made from the store of the run and known to no one else: `torch.distributed.new_group` would have
    every rank of the world take part in each. Tensors on a GPU are staged through pinned memory, so several ranks may
    share one device; with `direct` they go from GPU to GPU over groups of that backend, and gloo carries headers only.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        global_ranks: Sequence[int],
        device: torch.device,
        watch: FailureWatch,
        store: PrefixStore,
        direct: DirectGroup | None = None,
    ) -> None:
        self.mailbox = Mailbox()
        self._watch = watch
        self._out: dict[tuple[int, Kind], Outbox | DirectOutbox] = {}
        self._in: list[Inbox | DirectInbox] = []
        watch.on_failure(self.mailbox.fail_waiters)
        self._store, seal = store, watch.seal
        self._global_rank = global_ranks[rank]
        self._neighbours: set[int] = set()
        for source, destination, kind in plan.directed_links:
            if rank not in (source, destination):
                continue
            peer = global_ranks[destination if rank == source else source]
            self._neighbours.add(peer)
            name = f"{global_ranks[source]}-{global_ranks[destination]}-{kind}"
            end = int(rank == destination)
            fault_point("transport.told")
            group = ProcessGroupGloo(PrefixStore(name, self._store), end, 2, IDLE)

            def report_lost(error: BaseException, peer: int = peer) -> None:
                watch.report_lost_peer(peer, error)

            if direct is not None:
                payload = direct(PrefixStore(f"direct/{name}", self._store), end)
                if rank == source:
                    self._out[destination, kind] = DirectOutbox(group, payload, peer, device, report_lost, seal)
                else:
                    self._in.append(DirectInbox(group, payload, peer, device, self.mailbox.put, report_lost, seal))
            elif rank == source:
                self._out[destination, kind] = Outbox(group, peer, device, report_lost, seal)
            else:
                self._in.append(Inbox(group, peer, device, self.mailbox.put, report_lost, seal))

    def send(self, rank: int, key: Key, tree: object, flags: tuple[bool, ...] = ()) -> None:
        self._out[rank, send_of(key[1]).kind].send(key, tree, flags)

    def close(self) -> None:
        failed = self._watch.error is not None
        for outbox in self._out.values():
            outbox.close(failed)
        for inbox in self._in:
            inbox.close(failed)
        if not failed:
            self._wait_for_neighbours()
        self._out, self._in = {}, []

    def _wait_for_neighbours(self) -> None:
        """Wait until the neighbours have read everything too. A connection that one end closes while bytes are in
        flight is reset, and the other end loses its unread bytes."""
        mine, neighbours = self._global_rank, sorted(self._neighbours)
        for peer in neighbours:
            self._store.set(f"closed/{mine}-{peer}", "")
        for peer in neighbours:
            self._store.wait([f"closed/{peer}-{mine}"], timedelta(seconds=30))


class LoopbackTransport:
    """Ranks in one process: a message goes through the same bytes, and is in the other's mailbox at once."""

    def __init__(self, mailboxes: Sequence[Mailbox], rank: int) -> None:
        self.mailbox = mailboxes[rank]
        self._mailboxes = mailboxes

    def send(self, rank: int, key: Key, tree: object, flags: tuple[bool, ...] = ()) -> None:
        wire, tensors = Encoder().encode(key, tree, flags, 0)
        wire.copy_tensors(tensors)
        self._mailboxes[rank].put(Decoder().decode(wire.buffer, 0, 0))

    def close(self) -> None:
        pass


KINDS = ("auto", "local", "gloo", "nccl")
"""The transports that can be asked for."""


def make_transport(
    plan: Plan,
    rank: int,
    global_ranks: Sequence[int],
    device: torch.device,
    watch: FailureWatch,
    kind: str = "auto",
) -> Transport:
    """Return the transport for the placement of the ranks: a collective call of all ranks of the pipeline.

    Args:
        kind: "auto" takes shared memory ("local") where all ranks are on one host and tensors in ordinary memory,
            "nccl" where every rank has a GPU of its own, and "gloo" otherwise, which stages tensors of a GPU through
            pinned memory. Any other name requires that transport.

    Raises:
        InputError: the named transport is not available.
    """
    if plan.n_ranks == 1:
        return LoopbackTransport([Mailbox()], 0)
    fault_point("transport")
    store = watch.sub_store()
    if kind == "auto":
        kind = _choose(store, global_ranks[rank], list(global_ranks), device, watch)
    if kind == "local":
        if device.type != "cpu" or not host_id():
            raise InputError(f"transport 'local' needs Linux and tensors on the CPU, not on {device}; choose 'gloo'")
        return LocalTransport(plan, rank, global_ranks, watch, store)
    if kind == "nccl":
        if device.type != "cuda":
            raise InputError(f"transport 'nccl' needs tensors on a GPU, not on {device}; choose 'gloo'")
        return GlooTransport(plan, rank, global_ranks, device, watch, store, nccl_group)
    if kind != "gloo":
        raise InputError(f"there is no transport {kind!r}; choose one of {', '.join(KINDS)}")
    return GlooTransport(plan, rank, global_ranks, device, watch, store)


def _choose(store: PrefixStore, rank: int, ranks: list[int], device: torch.device, watch: FailureWatch) -> str:
    mine = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else f"cpu of {host_id()}"
    store.set(f"place/{rank}", mine)
    places = [*watch.wait_for_values(store, {r: f"place/{r}" for r in ranks}).values()]
    if device.type == "cpu":
        return "local" if host_id() and len(set(places)) == 1 else "gloo"
    if len(set(places)) == len(places):
        return "nccl"
    if rank == ranks[0]:
        warnings.warn("several ranks share a GPU: tensors are staged through the host's memory", stacklevel=3)
    return "gloo"
