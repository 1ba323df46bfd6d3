"""Transports, which hold all channels of one rank: over gloo, through shared memory, or within one process.

For direct channels between GPUs, gloo carries the headers of messages, and another backend carries the tensors. NCCL
does not support tags, does not check sizes, and can't describe a received tensor. Each message is therefore preceded by
a small header, which is sent over an ordinary channel and contains all shapes. The receiver posts its receives when the
header has arrived. Both ends process the messages of a channel in the same order, as NCCL requires.
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
from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]
from torch.utils import _pytree as pytree

from lightning_pipes.engine.messages.channel import RECEIVER, SENDER, Inbox, Outbox, Work, record_stream_use
from lightning_pipes.engine.messages.local import LocalTransport, host_id
from lightning_pipes.engine.messages.mailbox import Key, Mailbox, Transport
from lightning_pipes.engine.messages.message import Decoder, Encoder, Message
from lightning_pipes.engine.watch.failure import FailureWatch
from lightning_pipes.engine.watch.fault_points import fault_point
from lightning_pipes.engine.watch.trust import Seal
from lightning_pipes.ir import InputError, Instruction, Kind, Plan, send_of
from lightning_pipes.ir.clock import read_nanoseconds

CPU = torch.device("cpu")


class Payload(Protocol):
    """The methods of a process group of two ranks that are used here."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work: ...
    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> Work: ...


DirectGroup = Callable[[PrefixStore, int], Payload]
"""Creates one end, 0 or 1, of a process group of two ranks."""


def nccl_group(store: PrefixStore, end: int) -> Payload:
    """Create one end of an NCCL communicator of two ranks.

    Args:
        store: the store through which both ends meet.
        end: 0 for the sender, 1 for the receiver.
    """
    nccl: Any = dist.ProcessGroupNCCL  # does not exist in builds without NCCL
    group: Payload = nccl(store, end, 2, nccl.Options())
    return group


@dataclass(frozen=True)
class _TensorSpec:
    """Describes a tensor in a header."""

    shape: torch.Size
    dtype: torch.dtype


class _Stream:
    """A separate CUDA stream on a GPU. On a CPU, on which the same code is tested, all methods do nothing."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        # The stream of the computing thread, which creates this object.
        self._user = torch.cuda.current_stream(device) if on_gpu else None

    def use_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def after_current(self) -> None:
        """Make later work on this stream wait for the work enqueued so far on the current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def publish_tensors(self, tree: Any) -> None:
        """Wait for this stream, and record that the stream of the computing thread uses the tensors of `tree`."""
        if self._stream is not None:
            self._stream.synchronize()
            record_stream_use(self._user, tree)


class DirectOutbox:
    """The sending end of a direct channel.

    `send` sends the header and enqueues the tensors. A background thread keeps the tensors alive until they are sent.
    """

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
        """Start sending one message. Messages arrive in the order of the calls."""
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
    """The receiving end of a direct channel.

    The thread that receives a header also receives the tensors that it describes.
    """

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


RECEIVE_TIMEOUT = timedelta(days=30)
"""Timeout of posted receives. It is long because a validation that does not use the pipeline may take hours, and
because the failure watch detects dead ranks."""


class GlooTransport:
    """A transport with one channel per neighbor and direction, each over a separate gloo group.

    The groups are created directly from the store of the run, because every rank of the world would have to take part
    in `torch.distributed.new_group`. Tensors on a GPU are staged through pinned memory, so several ranks may share one
    device. With `direct`, tensors are sent from GPU to GPU over groups of that backend, and gloo carries only the
    headers.

    Args:
        plan: the plan, whose neighboring stages are connected.
        rank: the pipeline rank of this process.
        global_ranks: the global rank of each pipeline rank.
        device: the device of the tensors on this rank.
        watch: the failure watch of the run.
        store: a part of the store of the run.
        direct: creates the groups for tensors; None stages tensors through host memory.
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
            group = ProcessGroupGloo(PrefixStore(name, self._store), end, 2, RECEIVE_TIMEOUT)

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
        """Wait until the neighbors have read everything.

        If one end closes a connection while bytes are in flight, the connection is reset, and the other end loses the
        bytes that it has not read.
        """
        mine, neighbours = self._global_rank, sorted(self._neighbours)
        for peer in neighbours:
            self._store.set(f"closed/{mine}-{peer}", "")
        for peer in neighbours:
            self._store.wait([f"closed/{peer}-{mine}"], timedelta(seconds=30))


class LoopbackTransport:
    """A transport for ranks in one process.

    Messages are encoded and decoded as usual, and put into the mailbox of the receiver immediately.
    """

    def __init__(self, mailboxes: Sequence[Mailbox], rank: int) -> None:
        self.mailbox = mailboxes[rank]
        self._mailboxes = mailboxes

    def send(self, rank: int, key: Key, tree: object, flags: tuple[bool, ...] = ()) -> None:
        wire, tensors = Encoder().encode(key, tree, flags, 0)
        wire.copy_tensors(tensors)
        self._mailboxes[rank].put(Decoder().decode(wire.buffer, 0, 0))

    def close(self) -> None:
        pass


TRANSPORT_KINDS = ("auto", "local", "gloo", "nccl")
"""The values that `make_transport` accepts as `kind`."""


def make_transport(
    plan: Plan,
    rank: int,
    global_ranks: Sequence[int],
    device: torch.device,
    watch: FailureWatch,
    kind: str = "auto",
) -> Transport:
    """Create the transport that fits the placement of the ranks.

    This is a collective call of all ranks of the pipeline.

    Args:
        plan: the plan, whose neighboring stages are connected.
        rank: the pipeline rank of this process.
        global_ranks: the global rank of each pipeline rank.
        device: the device of the tensors on this rank.
        watch: the failure watch of the run.
        kind: "auto" selects "local" (shared memory) if all ranks run on the CPU of one host, "nccl" if each rank has a
            GPU of its own, and otherwise "gloo", which stages the tensors of a GPU through pinned memory. Any other
            name requires that transport.

    Raises:
        InputError: the requested transport is not available.
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
        raise InputError(f"there is no transport {kind!r}; choose one of {', '.join(TRANSPORT_KINDS)}")
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
