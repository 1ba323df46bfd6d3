"""Tests of weight versions that take turns on a device, bitwise against runs whose versions all stay there."""

from __future__ import annotations

import csv
from functools import cache
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from lightning_pipes.engine.residency.copier import copier_for
from lightning_pipes.testing.ranks import run_ranks
from tests.engine.residency.virtual import Virtual
from tests.toys.install import install
from tests.trainer.lit import differences
from tests.trainer.stashes import LINEAR, Stashing, fit, turning

CASES = {
    "2bw": Stashing(2, "pipedream_2bw", 2, {"accumulate_grad_batches": 2}),
    "moving": Stashing(2, "stashing_mover", 2),
    "ahead": Stashing(2, "stashing_mover", 2, relocation="overlapped"),
    "pipedream": Stashing(3, "pipedream", 1, {"val_check_interval": 5}, resumes=True),
    "2bw by units": Stashing(2, "pipedream_2bw", 2, {"accumulate_grad_batches": 2}, by_units=True),
    "pipedream by units": Stashing(3, "pipedream", 1, {"val_check_interval": 5}, resumes=True, by_units=True),
    "dynpipe": Stashing(3, "dynpipe", 2, {"accumulate_grad_batches": 2}),
}
RATE = 2e6
"""Bytes per second of the slow link."""


def link(device: torch.device, bandwidth: float) -> Virtual:
    """Return a link with a virtual clock.

    Computation takes no time on this clock, so every copy that is read must be waited for.
    """
    return Virtual(bandwidth)


def of_rank(rank: int, keys: list[str], folder: str) -> dict[str, list[dict[str, Any]]]:
    """For each case, return a run whose versions all stay on the device, and a run whose versions take turns.

    Cases that resume add a run whose versions take turns and which resumes from a checkpoint of the first run.
    """
    install("mover")
    found: dict[str, list[dict[str, Any]]] = {}
    for key in keys:
        case, saved = CASES[key], f"{folder}/{key}/step=7.ckpt"
        found[key] = [fit(case, f"{folder}/{key}", None)]
        with patch("lightning_pipes.arrays.memory_swap.copier_for", link if key == "pipedream" else copier_for):
            found[key].append(fit(case, f"{folder}/{key}/2", turning(1, RATE)))
        if case.resumes:
            found[key].append(fit(case, f"{folder}/{key}/3", turning(1), resume=saved))
    return found


@cache
def results(ranks: int) -> list[dict[str, list[dict[str, Any]]]]:
    keys = [key for key, case in CASES.items() if case.ranks == ranks]
    return run_ranks(of_rank, ranks, keys, mkdtemp(), timeout=120)


@pytest.mark.parametrize("key", [key for key in CASES if key != "ahead"])
def test_bit_for_bit(key: str) -> None:
    for of in results(CASES[key].ranks):
        plain, *turned = of[key]
        for found in turned:
            for name in ("weights", "metrics", "steps", "layers"):
                assert differences(found[name], plain[name], tolerance=0) == [], name
        assert plain["layers"] == 1 + (key == "moving")


def test_layers_that_move_while_batches_go_on() -> None:
    """Check that weights stay close to the weights of a run whose versions all stay on the device.

    Layers move during batches here. The time at which such a move ends, and a window with it, varies between runs, so
    the weights are not bitwise equal.
    """
    for of in results(2):
        plain, turned = of["ahead"]
        assert turned["layers"] == 2
        assert differences(turned["weights"], plain["weights"], tolerance=1e-2) == []
        assert all(np.isfinite(weights).all() for weights in turned["weights"].values())


def test_versions_took_turns() -> None:
    """Check the versions and copies of the first of three stages against the number that must have moved.

    This stage keeps two versions besides the current one, and the device has room for one of them.
    """
    *_, first = results(3)
    for found in first["pipedream"][1:]:
        assert found["most"] == 3
        assert found["statistics"].bytes_in > 8 * 3 * LINEAR // 2
        assert found["statistics"].bytes_out > 8 * 3 * LINEAR // 2
    for found in first["pipedream by units"][1:]:
        assert found["statistics"].leases > 0
        assert found["statistics"].bytes_in > 8 * 3 * LINEAR // 2
    statistics = first["pipedream"][1]["statistics"]
    assert statistics.late > 0
    assert statistics.stall_ns >= 2 * LINEAR / RATE * 1e9  # at least one version of two layers
    assert first["dynpipe"][1]["most"] == 2


def test_what_all_ranks_count_is_logged() -> None:
    """Check that logged values cover all ranks.

    The first rank logs them. It has the last stage, which does not wait for any version.
    """
    last, *others = results(3)
    rows = [row for row in csv.DictReader(last["pipedream"][1]["logged"].splitlines()) if row["memory_hit_rate"]]
    assert last["pipedream"][1]["statistics"].leases == 0
    bytes_moved = sum(s.bytes_in + s.bytes_out for s in (of["pipedream"][1]["statistics"] for of in others))
    assert 0 < float(rows[-1]["memory_gigabytes"]) <= bytes_moved / 1e9
    assert 0 < float(rows[-1]["memory_hit_rate"]) <= 1
    waited = sum(of["pipedream"][1]["statistics"].stall_ns for of in others) / 1e9
    assert 0 < float(rows[-1]["memory_stall_seconds"]) <= waited
    assert float(rows[-1]["memory_late"]) > 0
