"""All channels of one rank: over gloo, through memory shared by one host's processes, or hand to hand inside one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from lightning_pipes.engine.channel import Inbox, Outbox
from lightning_pipes.engine.failure import FailureWatch
from lightning_pipes.engine.local import Listener, LocalInbox, LocalMailbox, LocalOutbox, same_host
from lightning_pipes.engine.mailbox import Key, Mailbox, Transport
from lightning_pipes.engine.message import Decoder, Encoder
from lightning_pipes.ir import Kind, Plan, PlanError

IDLE = timedelta(days=30)
"""How long a posted receive may stay unanswered: a validation that does not use the pipeline may take hours, and the
dead are noticed by the failure watch."""


def links(plan: Plan) -> list[tuple[int, int, Kind]]:
    """Every (source, destination, what is sent) between pipeline ranks, in an order that all ranks share."""
    pairs = {(plan.ranks[s], plan.ranks[s + 1]) for s in range(plan.n_stages - 1) if plan.crosses(s)}
    return sorted([(a, b, Kind.SF) for a, b in pairs] + [(b, a, Kind.SB) for a, b in pairs])


class GlooTransport:
    """One channel per neighbour and direction, each over a gloo group of its own.

    The groups are made from the store of the run and known to no one else: `torch.distributed.new_group` would have
    every rank of the world take part in each. Tensors on a GPU are staged through pinned memory, so several ranks may
    share one device.
    """

    def __init__(
        self, plan: Plan, rank: int, global_ranks: Sequence[int], device: torch.device, watch: FailureWatch
    ) -> None:
        self.mailbox = Mailbox()
        self._watch = watch
        self._out: dict[tuple[int, Kind], Outbox] = {}
        self._in: list[Inbox] = []
        watch.on_failure(self.mailbox.fail)
        self._store = watch.store()
        self._global_rank = global_ranks[rank]
        self._neighbours: set[int] = set()
        for source, destination, kind in links(plan):
            if rank not in (source, destination):
                continue
            peer = global_ranks[destination if rank == source else source]
            self._neighbours.add(peer)
            name = f"{global_ranks[source]}-{global_ranks[destination]}-{kind}"
            group = ProcessGroupGloo(PrefixStore(name, self._store), int(rank == destination), 2, IDLE)

            def lost(error: BaseException, peer: int = peer) -> None:
                watch.lost(peer, error)

            if rank == source:
                self._out[destination, kind] = Outbox(group, peer, device, lost)
            else:
                self._in.append(Inbox(group, peer, device, self.mailbox.put, lost))

    def send(self, rank: int, key: Key, tree: object, flags: tuple[bool, ...] = ()) -> None:
        kind = Kind.SF if key[1].kind is Kind.RF else Kind.SB
        self._out[rank, kind].send(key, tree, flags)

    def close(self) -> None:
        failed = self._watch.error is not None
        for outbox in self._out.values():
            outbox.close(failed)
        for inbox in self._in:
            inbox.close(failed)
        if not failed:
            self._part()
        self._out, self._in = {}, []

    def _part(self) -> None:
        """Waits until the neighbours have read everything too: a connection that one end closes while bytes are on
        their way is reset, and the other end loses what it has not read."""
        mine, neighbours = self._global_rank, sorted(self._neighbours)
        for peer in neighbours:
            self._store.set(f"closed/{mine}-{peer}", "")
        for peer in neighbours:
            self._store.wait([f"closed/{peer}-{mine}"], timedelta(seconds=30))


class LocalTransport:
    """One channel per neighbour and direction, all on one host, tensors in ordinary memory."""

    def __init__(self, plan: Plan, rank: int, global_ranks: Sequence[int], watch: FailureWatch, store: PrefixStore):
        mailbox = self.mailbox = LocalMailbox()
        self._watch = watch
        self._out: dict[tuple[int, Kind], LocalOutbox] = {}
        self._in: list[LocalInbox] = []
        watch.on_failure(mailbox.fail)
        mine = global_ranks[rank]
        listener = Listener()
        store.set(f"address/{mine}", listener.name)

        def lost(peer: int) -> Callable[[BaseException], None]:
            return lambda error: watch.lost(peer, error)

        expected = 0
        for source, destination, kind in links(plan):
            if rank == source:
                peer = global_ranks[destination]
                address = store.get(f"address/{peer}").decode()
                self._out[destination, kind] = LocalOutbox(address, mine, kind, mailbox, lost(peer))
            elif rank == destination:
                expected += 1
        for _ in range(expected):
            peer, connection = listener.accept(watch)
            self._in.append(LocalInbox(connection, mailbox, lost(peer)))
        listener.close()

    def send(self, rank: int, key: Key, tree: object, flags: tuple[bool, ...] = ()) -> None:
        kind = Kind.SF if key[1].kind is Kind.RF else Kind.SB
        self._out[rank, kind].send(key, tree, flags)

    def close(self) -> None:
        failed = self._watch.error is not None
        for outbox in self._out.values():
            outbox.close(failed)
        deadline = time.monotonic() + 10
        while not failed and not all(inbox.ended for inbox in self._in) and time.monotonic() < deadline:
            self.mailbox.fetch(0.1)
        for inbox in self._in:
            inbox.close()
        self.mailbox.close()
        self._out, self._in = {}, []


class LoopbackTransport:
    """Ranks in one process: what is sent goes through the same bytes and lies in the other's mailbox at once."""

    def __init__(self, mailboxes: Sequence[Mailbox], rank: int) -> None:
        self.mailbox = mailboxes[rank]
        self._mailboxes = mailboxes

    def send(self, rank: int, key: Key, tree: object, flags: tuple[bool, ...] = ()) -> None:
        wire, tensors = Encoder().encode(key, tree, flags, 0)
        wire.fill(tensors)
        self._mailboxes[rank].put(Decoder().decode(wire.buffer, 0, 0))

    def close(self) -> None:
        pass


def make_transport(
    plan: Plan,
    rank: int,
    global_ranks: Sequence[int],
    device: torch.device,
    watch: FailureWatch,
    kind: str = "auto",
) -> Transport:
    """The transport for where the ranks are: a collective call of all ranks of the pipeline.

    Args:
        kind: "auto" takes shared memory where all ranks are on one host and tensors in ordinary memory, and gloo
            elsewhere; "local" and "gloo" insist.

    Raises:
        PlanError: shared memory is insisted on where it can't be had.
    """
    if plan.n_ranks == 1:
        return LoopbackTransport([Mailbox()], 0)
    store = watch.store()
    if kind == "gloo":
        return GlooTransport(plan, rank, global_ranks, device, watch)
    near = same_host(store, global_ranks[rank], list(global_ranks)) and device.type == "cpu"
    if not near and kind == "local":
        raise PlanError(f"transport 'local' needs all ranks on one Linux host and tensors on the CPU, not on {device}")
    if near:
        return LocalTransport(plan, rank, global_ranks, watch, store)
    return GlooTransport(plan, rank, global_ranks, device, watch)
