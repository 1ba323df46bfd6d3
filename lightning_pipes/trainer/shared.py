"""Connections that the siblings of an array have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from lightning_pipes.engine.failure import FailureWatch
from lightning_pipes.engine.mailbox import Key, Mailbox, Transport
from lightning_pipes.ir import PlanError
from lightning_pipes.sim.timeline import Event
from lightning_pipes.trainer.control import Control, Place
from lightning_pipes.trainer.sibling_board import Board

_GATHER_TIMEOUT = timedelta(minutes=5)
"""How long ranks wait for each other in the end, where no sibling says it."""


class Shared:
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
        self.board = Board()
        self.facts: dict[str, Any] = {}
        self._sizes_are_equal = False
        self._controls: list[Control] = []
        self._places: Sequence[Place] = ()

    def watched(self, make: Callable[[], FailureWatch], rank: int, ranks: int) -> FailureWatch:
        """The watch of all siblings; the first one makes it."""
        if self.watch is None:
            self.watch = make()
            self.board.open(self.watch.store, rank, ranks)
        return self.watch

    def check_size(self, meeting: str, size: int) -> None:
        """Compares the sizes that arrays have told at a `meeting`, unless they are known to be equal.

        Raises:
            PlanError: they are not equal.
        """
        if self._sizes_are_equal:
            return
        sizes = {self.board.rank: str(size)} | {rank: self.board.value(meeting, rank) for rank in self.board.others}
        if len(set(sizes.values())) > 1:
            each = ", ".join(f"{sizes[rank]} on rank {rank}" for rank in sorted(sizes))
            raise PlanError(
                f"the array has size {each}; all ranks need the same number of siblings at a time, so it can't depend "
                "on what one of them finds"
            )
        self._sizes_are_equal = True

    def connected(self, make: Callable[[], Transport]) -> Transport:
        """The transport of all siblings, which no single one closes; the first one makes it."""
        if self.transport is None:
            self.transport = make()
        return _Kept(self.transport)

    def control(self, make: Callable[[Sequence[Place]], Control]) -> Control:
        """Connections for one sibling, made unless one that has ended left its own. Collective: all ranks have met, for
        one that took connections although the sibling has failed elsewhere would have others than those later."""
        control = self._controls.pop(0) if self._controls else make(self._places)
        self._places = control.places
        return control

    def take_back(self, control: Control) -> None:
        """A sibling has no use for its connections any more. Collective: all calls on them were made by all ranks."""
        self._controls.append(control)

    def gathered(self, events: Sequence[Event]) -> Sequence[Sequence[Event]]:
        """What each rank gives. Collective."""
        if not self.board.others:
            return [events]
        if not self._controls:  # siblings that were pruned, or failed, leave none
            assert self.watch is not None
            self._controls.append(Control(range(len(self.board.others) + 1), self.watch, _GATHER_TIMEOUT))
        return self._controls[0].all_gather(events)

    def close(self) -> None:
        """Ends them."""
        for control in self._controls:
            control.close()
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
