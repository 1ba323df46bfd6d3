"""Sends trees of tensors among the ranks of a pipeline, for code that waits for them together with messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from lightning_pipes.engine.messages.bulk_transfer import BulkTransfer, Key


class PendingTree(Protocol):
    """A tree that has not necessarily arrived."""

    def is_done(self) -> bool:
        """Return whether it has arrived.

        Raises:
            PeerFailure: a rank has failed before.
        """

    @property
    def content(self) -> Any:
        """The content that was sent."""


class TreeTransport(Protocol):
    """Carries trees of tensors from rank to rank of a pipeline."""

    def send(self, rank: int, key: Key, content: Any) -> None:
        """Start to send; `content` may change afterwards."""

    def receive(self, rank: int, key: Key, on_arrival: Callable[[], None]) -> PendingTree:
        """Return the content that `rank` sends, or has sent, under that key; calls `on_arrival`, on any thread, when it
        has arrived."""


class BulkTreeTransport:
    """A tree transport over bulk transfers.

    Args:
        ranks: the global rank of each rank of the pipeline.
    """

    def __init__(self, transfer: BulkTransfer, ranks: Sequence[int]) -> None:
        self._transfer, self._ranks = transfer, tuple(ranks)

    def send(self, rank: int, key: Key, content: Any) -> None:
        copies = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), content)
        self._transfer.send(self._ranks[rank], key, copies)

    def receive(self, rank: int, key: Key, on_arrival: Callable[[], None]) -> PendingTree:
        return self._transfer.receive(self._ranks[rank], key, on_arrival)
