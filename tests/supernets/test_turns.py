"""Layers of a supernet that take turns on a device: bit by bit what they are where all of them stay there."""

from __future__ import annotations

import re
from functools import cache
from tempfile import mkdtemp
from typing import Any

import pytest

from lightning_pipes import MemorySwap
from lightning_pipes.strategies.csp import CSP
from lightning_pipes.testing.ranks import run_ranks
from tests.supernets.nets import alone, fit

BATCHES = 20


@cache
def plain(shared: str) -> dict[str, Any]:
    return alone(shared, BATCHES)


def swapped(rank: int, ranks: int, shared: str, device_bytes: int, bandwidth: float | None, prefetch: bool) -> Any:
    memory = MemorySwap(device_bytes, bandwidth=bandwidth, prefetch=prefetch)
    memory._poison = True
    found = fit(rank, ranks, shared, BATCHES, mkdtemp(), recompute=ranks > 1, memory=memory)
    return found, memory.statistics


@pytest.mark.parametrize(
    ("ranks", "shared", "device_bytes", "bandwidth", "bytes_in"),
    [
        (1, "sequential", 130_000, None, 500_000),
        (2, "delayed", 60_000, None, 100_000),
        (2, "frozen", 60_000, 2e7, 80_000),
    ],
)
def test_bit_for_bit(ranks: int, shared: str, device_bytes: int, bandwidth: float | None, bytes_in: int) -> None:
    wanted = plain(shared)
    for found, statistics in run_ranks(swapped, ranks, ranks, shared, device_bytes, bandwidth, True, timeout=120):
        assert found["weights"] == wanted["weights"]
        assert found["losses"] == wanted["losses"]
        assert statistics.bytes_in > bytes_in, statistics


def refused(rank: int, schedule: str | CSP, ranks: int, recompute: bool, device_bytes: int) -> str:
    try:
        fit(
            rank, ranks, "frozen", 6, mkdtemp(), schedule=schedule, recompute=recompute, memory=MemorySwap(device_bytes)
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("schedule", "ranks", "recompute", "device_bytes", "says"),
    [
        (
            "1f1b",
            1,
            False,
            10**6,
            "'1f1b' runs all layers for each batch, and has one version. Leave MemorySwap out, or",
        ),
        ("pipedream", 2, False, 10**6, r"PipelineError: MemorySwap has the weight versions .*\(recompute=True\): a"),
        ("csp", 2, False, 10**6, r"PipelineError: MemorySwap needs PipelineStrategy\(recompute=True\)"),
        (
            CSP(split_backward=True),
            2,
            True,
            10**6,
            "splits backward: weight .* Leave MemorySwap out, or split_backward",
        ),
        (CSP(balanced=True), 2, True, 10**6, "go from rank to rank, and can't take turns on the device"),
        ("csp", 1, False, 9000, r"PlanError: no room on .* layers 1\.1, .*, the largest that a batch may use"),
        ("csp", 1, False, 900, "PlanError: no room on the device for layers .*; give MemorySwap more device_bytes"),
    ],
)
def test_says_what_is_missing(schedule: str | CSP, ranks: int, recompute: bool, device_bytes: int, says: str) -> None:
    assert re.search(says, run_ranks(refused, ranks, schedule, ranks, recompute, device_bytes, timeout=60)[0])
