"""Parcels among the ranks of a pipeline that somebody waits for together with messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from lightning_pipes.engine.messages.parcels import Key, Parcels


class Expected(Protocol):
    """A content that is to come."""

    def done(self) -> bool:
        """Whether it is here.

        Raises:
            PeerFailure: a rank has failed before.
        """

    @property
    def content(self) -> Any:
        """The content that was sent."""


class Post(Protocol):
    """Carries trees of tensors from rank to rank of a pipeline."""

    def send(self, rank: int, key: Key, content: Any) -> None:
        """Starts to send; what is in `content` may change afterwards."""

    def expect(self, rank: int, key: Key, told: Callable[[], None]) -> Expected:
        """The content that `rank` sends, or has sent, by that key; calls `told`, on any thread, when it is here."""


class ParcelPost:
    """By parcels.

    Args:
        ranks: the global rank of each rank of the pipeline.
    """

    def __init__(self, parcels: Parcels, ranks: Sequence[int]) -> None:
        self._parcels, self._ranks = parcels, tuple(ranks)

    def send(self, rank: int, key: Key, content: Any) -> None:
        copies = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), content)
        self._parcels.send(self._ranks[rank], key, copies)

    def expect(self, rank: int, key: Key, told: Callable[[], None]) -> Expected:
        return self._parcels.expect(self._ranks[rank], key, told)
