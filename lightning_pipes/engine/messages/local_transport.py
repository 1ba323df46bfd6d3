"""Connects the ranks of one host."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Sequence

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from lightning_pipes.engine.messages.local import CONNECT_SECONDS, HELLO, LocalInbox, LocalMailbox, LocalOutbox
from lightning_pipes.engine.messages.mailbox import Key
from lightning_pipes.engine.watch.failure import FailureWatch
from lightning_pipes.engine.watch.fault_points import fault_point
from lightning_pipes.engine.watch.trust import same_user
from lightning_pipes.ir import Kind, Plan

_RECEIVED = {Kind.SF: Kind.RF, Kind.SB: Kind.RB}


def host_id() -> str:
    """Return a name that processes have in common if they can share memory and a socket; empty where none can."""
    if sys.platform != "linux":
        return ""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{os.getuid()}"


class PeerListener:
    """A socket to which the peers of one rank connect."""

    def __init__(self) -> None:
        self.name = f"\0lightning_pipes-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.name)
        self._socket.listen(64)

    def accept_peer(self, watch: FailureWatch) -> tuple[int, socket.socket]:
        """Return the next peer's global rank and its connection.

        Raises:
            PeerFailure: another rank failed meanwhile.
            TimeoutError: no peer connected in time.
        """
        self._socket.settimeout(0.5)
        deadline = time.monotonic() + CONNECT_SECONDS
        while True:
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                watch.check()
                if time.monotonic() > deadline:
                    raise
                continue
            if not same_user(connection):  # messages are unpickled, so other users may not send any
                connection.close()
                continue
            connection.settimeout(CONNECT_SECONDS)
            (rank,) = HELLO.unpack(connection.recv(HELLO.size, socket.MSG_WAITALL))
            return rank, connection

    def close(self) -> None:
        self._socket.close()


class LocalTransport:
    """One channel per neighbour and direction, all on one host, with tensors in ordinary memory."""

    def __init__(self, plan: Plan, rank: int, global_ranks: Sequence[int], watch: FailureWatch, store: PrefixStore):
        mailbox = self.mailbox = LocalMailbox()
        self._watch = watch
        self._out: dict[tuple[int, Kind], LocalOutbox] = {}  # by rank and what it receives
        self._in: list[LocalInbox] = []
        watch.on_failure(mailbox.fail_waiters)
        mine = global_ranks[rank]
        listener = PeerListener()
        store.set(f"address/{mine}", listener.name)
        fault_point("transport.told")

        def make_lost_handler(peer: int) -> Callable[[BaseException], None]:
            return lambda error: watch.report_lost_peer(peer, error)

        expected = 0
        for source, destination, kind in plan.directed_links:
            if rank == source:
                peer = global_ranks[destination]
                address = store.get(f"address/{peer}").decode()
                self._out[destination, _RECEIVED[kind]] = LocalOutbox(address, mine, mailbox, make_lost_handler(peer))
            elif rank == destination:
                expected += 1
        for _ in range(expected):
            peer, connection = listener.accept_peer(watch)
            self._in.append(LocalInbox(connection, mailbox, make_lost_handler(peer)))
        listener.close()

    def send(self, rank: int, key: Key, tree: object, flags: tuple[bool, ...] = ()) -> None:
        self._out[rank, key[1].kind].send(key, tree, flags)

    def close(self) -> None:
        failed = self._watch.error is not None
        for outbox in self._out.values():
            outbox.close(failed)
        deadline = time.monotonic() + 10
        while not failed and not all(inbox.ended for inbox in self._in) and time.monotonic() < deadline:
            self.mailbox.fetch_messages(0.1)
        for inbox in self._in:
            inbox.close()
        self.mailbox.close()
        self._out, self._in = {}, []
