"""Subnets with cuts of their own, whose layers go from rank to rank: bit by bit one subnet after another."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from lightning_pipes.testing.ranks import run_ranks, watch_ranks
from tests.supernets.nets import Cut, alone, fit

SHORT = 20
"""Subnets of each of two epochs."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As on the ranks: sums on two threads are others in their last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def plain(shared: str, batches: int, drains: tuple[int, ...] = ()) -> dict[str, Any]:
    return alone(shared, batches, drains)


def cut(rank: int, ranks: int, shared: str, batches: int, folder: str, resume: str | None = None, **more: Any) -> Any:
    return fit(rank, ranks, shared, batches, folder, resume, kind=Cut, **more)


def in_turn(rank: int, ranks: int, folder: str) -> list[dict[str, Any]]:
    return [cut(rank, ranks, shared, SHORT, folder) for shared in ("sequential", "delayed", "frozen")]


def test_two_stages_train_as_one_process() -> None:
    for found in run_ranks(in_turn, 2, 2, mkdtemp(), timeout=120):
        for shared, each in zip(("sequential", "delayed", "frozen"), found, strict=True):
            assert each == plain(shared, SHORT)
