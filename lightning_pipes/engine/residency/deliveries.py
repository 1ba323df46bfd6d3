"""Transfers of layers between ranks for the batches of one window, and other needs of batches besides data.

A layer is sent when it is up to date. A forward that uses it waits for it. At the end of the window, layers are
returned to the ranks that own them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from lightning_pipes.engine.messages.bulk_transfer import Key
from lightning_pipes.engine.residency.mirrors import Mirrors, PendingTree
from lightning_pipes.ir import Instruction, Ledger, Need, Transfer


class NeedSource:
    """What the batches of an endless window wait for besides data, such as layers from other ranks.

    This base class has no needs.
    """

    @property
    def n_expected(self) -> int:
        """The number of needs that are in flight to this rank."""
        return 0

    @property
    def expected_text(self) -> str:
        """A description of the needs that are in flight to this rank."""
        return ""

    def take_arrived(self) -> Sequence[Need]:
        """Return the needs that have arrived since the last call.

        Raises:
            PeerFailure: a rank has failed.
        """
        return ()

    def enter(self, batch: int) -> None:
        """Register the next batch, which was already added to the ledger."""

    def forward_needs(self, batch: int, stage: int) -> tuple[Need, ...]:
        """Return the needs of the forwards of a batch on a stage that have not arrived yet."""
        return ()

    def step_needs(self, batch: int, stage: int) -> tuple[Need, ...]:
        """Return the needs of the optimizer step of a batch on a stage."""
        return ()

    def on_ready(self, batch: int, stage: int) -> None:
        """Prepare for a forward that has become ready."""

    def before_forward(self, batch: int, stage: int) -> None:
        """Prepare for a forward that begins now."""

    def after_step(self, step: Instruction) -> None:
        """Handle the end of an optimizer step, which was already recorded in the ledger."""

    def end_window(self) -> None:
        """Start to end the window. All of its batches have run on this rank. The method may be called repeatedly."""

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do after `end_window`."""
        return True


class LayerDeliveries(NeedSource):
    """Sends and receives the layers of one rank in one window.

    Args:
        ledger: decides which transfers are needed.
        rank: the rank of this process in the pipeline.
        window: the number of the window.
        mirrors: the copies of other ranks' layers on this rank.
        notify: called on any thread when a layer arrives; wakes the rank if it is waiting for messages.
    """

    def __init__(self, ledger: Ledger, rank: int, window: int, mirrors: Mirrors, notify: Callable[[], None]) -> None:
        self._ledger, self._rank, self._window, self._mirrors, self._notify = ledger, rank, window, mirrors, notify
        self._leaving: dict[Instruction, list[Transfer]] = defaultdict(list)
        self._expected: dict[Transfer, PendingTree] = {}
        self._received: dict[Transfer, Any] = {}
        self._returning = self._has_arrivals = False

    @property
    def n_expected(self) -> int:
        return len(self._expected)

    @property
    def expected_text(self) -> str:
        return f"{self.n_expected} layers"

    @property
    def is_over(self) -> bool:
        return self._returning and not self._expected

    def enter(self, batch: int) -> None:
        for transfer in self._ledger.batch_transfers(batch):
            self._start(transfer)

    def forward_needs(self, batch: int, stage: int) -> tuple[Transfer, ...]:
        return tuple(t for t in self._ledger.incoming_transfers(batch, stage) if t in self._expected)

    def take_arrived(self) -> list[Transfer]:
        if not self._has_arrivals:
            return []
        self._has_arrivals = False
        found = [transfer for transfer, expected in self._expected.items() if expected.is_done()]
        for transfer in found:
            content = self._expected.pop(transfer).content
            if transfer.batch < 0:
                self._mirrors.install_layer(transfer.name, content)
            else:
                self._received[transfer] = content
        return found

    def on_ready(self, batch: int, stage: int) -> None:
        if self._mirrors.memory is not None:  # which can then load the layers before the forward begins
            self.before_forward(batch, stage)

    def before_forward(self, batch: int, stage: int) -> None:
        """Install the received layers of a batch before its forward. No earlier batch needs the replaced layers."""
        for transfer in self._ledger.incoming_transfers(batch, stage):
            if transfer in self._received:
                self._mirrors.install_layer(transfer.name, self._received.pop(transfer))

    def after_step(self, step: Instruction) -> None:
        """Send the layers that waited for `step`, and drop copies that are no longer needed."""
        for transfer in self._leaving.pop(step, ()):
            self._send(transfer)
        for name in self._ledger.uses[step.batch].layers[step.stage]:
            self._forget(name)

    def end_window(self) -> None:
        """Return layers to their owners."""
        if not self._returning:
            self._returning = True
            for transfer in self._ledger.return_transfers():
                self._start(transfer)
            self._mirrors.clear()

    def _start(self, transfer: Transfer) -> None:
        if transfer.target == self._rank:
            self._expected[transfer] = self._mirrors.receive(transfer.source, self._key(transfer), self._on_arrival)
        elif transfer.source == self._rank:
            if transfer.after is not None and self._ledger.is_pending(transfer.after):
                self._leaving[transfer.after].append(transfer)
            else:
                self._send(transfer)
                self._forget(transfer.name)

    def _send(self, transfer: Transfer) -> None:
        self._mirrors.send(transfer.name, transfer.target, self._key(transfer))

    def _forget(self, name: str) -> None:
        if self._mirrors.is_remote(name) and self._ledger.is_stale(name, self._rank):
            self._mirrors.drop_copy(name)

    def _key(self, transfer: Transfer) -> Key:
        return self._window, transfer.batch, transfer.name

    def _on_arrival(self) -> None:
        self._has_arrivals = True
        self._notify()
