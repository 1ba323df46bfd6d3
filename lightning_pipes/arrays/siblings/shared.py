"""Connections that all siblings of an array share."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from lightning_pipes.arrays.siblings.sibling_board import PeerStore
from lightning_pipes.arrays.siblings.stage_loads import StageLoads
from lightning_pipes.engine.messages.mailbox import Key, Mailbox, Transport
from lightning_pipes.engine.residency.shared_tensors import SharedTensors
from lightning_pipes.engine.watch.failure import FailureWatch
from lightning_pipes.ir import InputError
from lightning_pipes.sim.timeline import Event
from lightning_pipes.trainer.ranks.control import Control, close_all

_GATHER_TIMEOUT = timedelta(minutes=5)
"""The timeout for gathering events at the end, if no connection of a sibling specifies another timeout."""


class SharedConnections:
    """Connections that the first sibling creates when it needs them, and that are closed with the array.

    Attributes:
        watch: detects ranks that die. None until the first sibling requests it.
        transport: carries all messages between stages. None until the first sibling requests it.
        board: the board on which ranks inform each other about siblings.
        facts: values that earlier siblings determined, by name.
        stage_loads: the work of the running siblings on each rank.
        tensors: the frozen tensors of all siblings.
    """

    def __init__(self) -> None:
        self.watch: FailureWatch | None = None
        self.transport: Transport | None = None
        self.board = PeerStore()
        self.facts: dict[str, Any] = {}
        self.stage_loads = StageLoads()
        self.tensors = SharedTensors()
        self._free: dict[int, Control] = {}
        """Connections that ended siblings have returned, by their number."""
        self._numbers: dict[Control, int] = {}
        """The numbers of the connections that siblings are using."""
        self._made = 0

    @property
    def has_met(self) -> bool:
        """Whether all ranks have connected, so that siblings can agree on stops."""
        return self._made > 0

    def get_watch(self, make: Callable[[], FailureWatch], rank: int, ranks: int) -> FailureWatch:
        """Return the watch that all siblings share. The first call creates it with `make` and opens the board."""
        if self.watch is None:
            self.watch = make()
            self.board.open(self.watch, rank, ranks)
        return self.watch

    def get_transport(self, make: Callable[[], Transport]) -> Transport:
        """Return the transport that all siblings share. The first call creates it with `make`.

        The returned transport ignores `close`, because other siblings may still use it.
        """
        if self.transport is None:
            self.transport = make()
        return _Kept(self.transport)

    def describe_free_controls(self, size: int) -> str:
        """Return the facts that ranks exchange before `take_control`, as JSON.

        Args:
            size: the size of the array.
        """
        return json.dumps([size, sorted(self._free)])

    def take_control(self, descriptions: Sequence[str], make: Callable[[], Control]) -> Control:
        """Return the connections for one sibling. Collective.

        Connections that an ended sibling has returned on all ranks are used again. Otherwise, new ones are created.
        Connections that were returned on some ranks only are dropped, because the sibling failed on the other ranks
        before it had finished using them.

        Args:
            descriptions: the results of `describe_free_controls` on all ranks, in the order of ranks.
            make: creates new connections.

        Raises:
            InputError: the arrays of other ranks have another size.
        """
        sizes, free = zip(*map(json.loads, descriptions), strict=True)
        if len(set(sizes)) > 1:
            each = ", ".join(f"{size} on rank {rank}" for rank, size in enumerate(sizes))
            raise InputError(
                f"the array has size {each}. All ranks must run the same number of siblings at a time. Compute the "
                "size from values that are equal on all ranks"
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
        """Take back connections that a sibling no longer needs. This rank must have finished all calls on them."""
        self._free[self._numbers.pop(control)] = control

    def gather_events(self, descriptions: Sequence[str], events: Sequence[Event]) -> Sequence[Sequence[Event]]:
        """Return the events of each rank. Collective.

        Args:
            descriptions: the results of `describe_free_controls` on all ranks, in the order of ranks.
            events: the events of this rank.
        """
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
    """A transport that all siblings share and that a single sibling cannot close."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @property
    def mailbox(self) -> Mailbox:
        return self._transport.mailbox

    def send(self, rank: int, key: Key, tree: object, flags: tuple[bool, ...] = ()) -> None:
        self._transport.send(rank, key, tree, flags)

    def close(self) -> None:
        pass
