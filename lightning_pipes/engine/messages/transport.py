"""All channels of one rank: over gloo, through shared memory of one host, or directly inside one process."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from lightning_pipes.engine.messages.channel import Inbox, Outbox
from lightning_pipes.engine.messages.direct import DirectGroup, DirectInbox, DirectOutbox, nccl_group
from lightning_pipes.engine.messages.local import CONNECT_SECONDS, LocalTransport, host_id
from lightning_pipes.engine.messages.mailbox import Key, Mailbox, Transport
from lightning_pipes.engine.messages.message import Decoder, Encoder
from lightning_pipes.engine.private_torch import ProcessGroupGloo
from lightning_pipes.engine.watch.failure import FailureWatch
from lightning_pipes.engine.watch.fault_points import fault_point
from lightning_pipes.ir import InputError, Kind, Plan, send_of

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
            "nccl" where every rank has a GPU of its own, and "gloo" elsewhere, which stages tensors of a GPU through
            pinned memory. Any other name requires that transport.

    Raises:
        InputError: the named transport is not available.
    """
    if plan.n_ranks == 1:
        return LoopbackTransport([Mailbox()], 0)
    fault_point("transport")
    store = watch.sub_store()
    if kind == "auto":
        kind = _choose(store, global_ranks[rank], list(global_ranks), device)
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


def _choose(store: PrefixStore, rank: int, ranks: list[int], device: torch.device) -> str:
    mine = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else f"cpu of {host_id()}"
    store.set(f"place/{rank}", mine)
    store.wait([f"place/{r}" for r in ranks], timedelta(seconds=CONNECT_SECONDS))
    places = [store.get(f"place/{r}").decode() for r in ranks]
    if device.type == "cpu":
        return "local" if host_id() and len(set(places)) == 1 else "gloo"
    if len(set(places)) == len(places):
        return "nccl"
    if rank == ranks[0]:
        warnings.warn("several ranks share a GPU: tensors are staged through the host's memory", stacklevel=3)
    return "gloo"
