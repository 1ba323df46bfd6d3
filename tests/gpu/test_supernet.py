"""Supernets on a GPU: concurrent subnets give the same results as sequential training on one rank.

This also holds if layers are swapped on the device or copied between ranks.
"""

from __future__ import annotations

from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from lightning_pipes import MemorySwap
from lightning_pipes.strategies.csp import CSP
from lightning_pipes.testing.ranks import run_ranks
from tests.supernets.nets import fit

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BATCHES = 20


def trained(rank: int, ranks: int, shared: str, device_bytes: int, balanced: bool) -> Any:
    memory = MemorySwap(device_bytes) if device_bytes else None
    schedule = CSP(depth=8, balanced=balanced)
    found = fit(
        rank, ranks, shared, BATCHES, mkdtemp(), schedule=schedule, recompute=bool(memory), memory=memory, gpu=True
    )
    return found, None if memory is None else memory.statistics


@pytest.mark.parametrize("shared", ["sequential", "delayed"])
@pytest.mark.parametrize(
    ("ranks", "device_bytes", "balanced"),
    [(2, 0, False), (1, 130_000, False), (2, 60_000, False), (2, 0, True), (2, 60_000, True)],
)
def test_the_same_bits_as_on_one_rank(ranks: int, shared: str, device_bytes: int, balanced: bool) -> None:
    ((wanted, _),) = run_ranks(trained, 1, 1, shared, 0, False, timeout=200)
    for found, statistics in run_ranks(trained, ranks, ranks, shared, device_bytes, balanced, timeout=200):
        assert found["weights"] == wanted["weights"]
        assert found["losses"] == wanted["losses"]
        assert statistics is None or statistics.bytes_in > device_bytes
