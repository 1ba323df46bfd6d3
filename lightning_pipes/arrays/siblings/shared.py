"""Connections that the siblings of an array have in common."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from lightning_pipes.arrays.siblings.sibling_board import PeerStore
from lightning_pipes.engine.messages.mailbox import Key, Mailbox, Transport
from lightning_pipes.engine.watch.failure import FailureWatch
from lightning_pipes.ir import InputError
from lightning_pipes.sim.timeline import Event
from lightning_pipes.trainer.ranks.control import Control, close_all

_GATHER_TIMEOUT = timedelta(minutes=5)
"""How long ranks wait for each other in the end, where no sibling says it."""


class SharedConnections:
    """Made by the first sibling that needs them, and ended with the array.

    Attributes:
        watch: sees ranks that die; None before the first sibling has asked for it.
        transport: of all messages; None before the first sibling has asked for it.
        board: on which ranks tell each other of siblings.
        facts: what the first sibling found out, by name; the others take it over, or have to agree.
    """

    def __init__(self) -> None:
        self.watch: FailureWatch | None = None
        self.transport: Transport | None = None
        self.board = PeerStore()
        self.facts: dict[str, Any] = {}
        self._free: dict[int, Control] = {}
        """Connections that siblings have left, by number."""
        self._numbers: dict[Control, int] = {}
        """Of those that siblings have."""
        self._made = 0

    @property
    def has_met(self) -> bool:
        """Whether all ranks have met, and siblings agree on what ends them."""
        return self._made > 0

    def get_watch(self, make: Callable[[], FailureWatch], rank: int, ranks: int) -> FailureWatch:
        """Return the watch of all siblings; the first one makes it."""
        if self.watch is None:
            self.watch = make()
            self.board.open(self.watch, rank, ranks)
        return self.watch

    def get_transport(self, make: Callable[[], Transport]) -> Transport:
        """Return the transport of all siblings, which no single one closes; the first one makes it."""
        if self.transport is None:
            self.transport = make()
        return _Kept(self.transport)

    def describe_free_controls(self, size: int) -> str:
        """Return the facts that ranks exchange before `take_control`, as JSON."""
        return json.dumps([size, sorted(self._free)])

    def take_control(self, descriptions: Sequence[str], make: Callable[[], Control]) -> Control:
        """Connections for one sibling, made unless one that has ended left its own on all ranks. Collective. Those that
        it left on some ranks only are given up: it has failed on others before it was through with them.

        Args:
            descriptions: of all ranks, by rank.

        Raises:
            InputError: arrays of other ranks have other sizes.
        """
        sizes, free = zip(*map(json.loads, descriptions), strict=True)
        if len(set(sizes)) > 1:
            each = ", ".join(f"{size} on rank {rank}" for rank, size in enumerate(sizes))
            raise InputError(
                f"the array has size {each}; all ranks need the same number of siblings at a time, so it can't depend "
                "on what one of them finds"
            )
        common = set.intersection(*map(set, free))
        self._free = {number: control for number, control in self._free.items() if number in common}
        if self._free:
            number = min(self._free)
            control = self._free.pop(number)
        else:
            self._made += 1
            number, control = self._made, make()
        self._numbers[control] = number
        return control

    def return_control(self, control: Control) -> None:
        """Take back connections that a sibling needs no longer: all calls on them were made by this rank."""
        self._free[self._numbers.pop(control)] = control

    def gather_events(self, descriptions: Sequence[str], events: Sequence[Event]) -> Sequence[Sequence[Event]]:
        """Return the events of each rank. Collective."""
        control = self.take_control(descriptions, self._last)
        self.return_control(control)
        return control.all_gather(events)

    def _last(self) -> Control:
        assert self.watch is not None, "there are other ranks"
        return Control(range(len(self.board.others) + 1), self.watch, _GATHER_TIMEOUT)

    def close(self) -> None:
        """Close all connections."""
        close_all(self._free.values())
        if self.transport is not None:
            self.transport.close()
        if self.watch is not None:
            self.watch.close()


class _Kept:
    """The transport of all siblings, which no single one closes."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @property
    def mailbox(self) -> Mailbox:
        return self._transport.mailbox

    def send(self, rank: int, key: Key, tree: object, flags: tuple[bool, ...] = ()) -> None:
        self._transport.send(rank, key, tree, flags)

    def close(self) -> None:
        pass
