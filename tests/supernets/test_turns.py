"""Tests that supernet layers that take turns on a device give, bit by bit, the result of layers that stay there."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache
from tempfile import mkdtemp
from typing import Any

import pytest

from lightning_pipes import MemorySwap
from lightning_pipes.ir import PlanError
from lightning_pipes.sim.residency import Statistics
from lightning_pipes.strategies.csp import CSP
from lightning_pipes.testing.ranks import run_ranks
from tests.supernets.nets import FACTS, alone, fit, steppers

BATCHES = 20


@cache
def plain(shared: str) -> dict[str, Any]:
    """Return the results of one process, cached by their arguments."""
    return alone(shared, BATCHES)


def swapped(rank: int, ranks: int, shared: str, device_bytes: int, predictor: str, balanced: bool) -> Any:
    """Train with swapping, and return the results, the statistics, the ranks of layers, and the line of the report."""
    slow: dict[str, Any] = {"bandwidth": 2e7} if ranks == 3 else {}
    memory, folder = MemorySwap(device_bytes, predictor=predictor, **slow), mkdtemp()
    memory._poison = True
    schedule = CSP(depth=8, balanced=balanced)
    found = fit(rank, ranks, shared, BATCHES, folder, schedule=schedule, recompute=ranks > 1, memory=memory)
    return found, memory.statistics, steppers(folder), FACTS.get("on the device", "")


@pytest.mark.parametrize(
    ("ranks", "shared", "device_bytes", "predictor", "balanced", "bytes_in"),
    [
        (1, "sequential", 130_000, "simulated", True, 500_000),
        (2, "delayed", 60_000, "algorithm_3", False, 100_000),
        (2, "sequential", 60_000, "in_turn", True, 100_000),
        (3, "frozen", 60_000, "simulated", True, 80_000),
    ],
)
def test_bit_for_bit(ranks: int, shared: str, device_bytes: int, predictor: str, balanced: bool, bytes_in: int) -> None:
    """Check the weights and losses against one process, and the statistics of swapping."""
    wanted, on = plain(shared), defaultdict[str, set[str]](set)
    ran = run_ranks(swapped, ranks, ranks, shared, device_bytes, predictor, balanced)
    total = Statistics.sum_devices([statistics for _, statistics, *_ in ran])
    assert ran[0][3].startswith(f"{total.hit_rate:.1%} of layers were on the device")
    assert f"(predictor {predictor!r}), {total.late} late, {total.misses} missed" in ran[0][3]
    assert total.hit_rate > 0.5
    for found, statistics, here, _ in ran:
        assert found["weights"] == wanted["weights"]
        assert found["losses"] == wanted["losses"]
        assert statistics.bytes_in > bytes_in, statistics
        for name, its_ranks in here.items():
            on[name] |= its_ranks
    assert any(len(its_ranks) > 1 for its_ranks in on.values()) == (balanced and ranks > 1)


def refused(rank: int, schedule: str | CSP, ranks: int, recompute: bool, device_bytes: int) -> str:
    """Return the error of a training with swapping."""
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
            "schedule '1f1b' has neither. Leave MemorySwap out, or",
        ),
        (
            "pipedream",
            2,
            False,
            10**6,
            r"PipelineError: MemorySwap moves weight versions .*\(recompute=True\). Without",
        ),
        ("csp", 2, False, 10**6, r"PipelineError: MemorySwap needs PipelineStrategy\(recompute=True\)"),
        (
            CSP(split_backward=True),
            2,
            True,
            10**6,
            "splits the backward pass, and weight .* Leave MemorySwap or split_backward out",
        ),
        ("csp", 1, False, 9000, r"PlanError: no room on .* layers 1\.1, .*, the largest that a batch may use"),
        ("csp", 1, False, 900, "PlanError: no room on the device for layers .* Give MemorySwap more device_bytes"),
    ],
)
def test_error_names_the_missing_setting(
    schedule: str | CSP, ranks: int, recompute: bool, device_bytes: int, says: str
) -> None:
    """Check that errors name the setting that swapping needs."""
    assert re.search(says, run_ranks(refused, ranks, schedule, ranks, recompute, device_bytes, timeout=60)[0])


def test_an_unknown_predictor_is_refused() -> None:
    with pytest.raises(PlanError, match="predictor must be one of in_turn, algorithm_3, simulated, got 'none'"):
        MemorySwap(10**6, predictor="none")
