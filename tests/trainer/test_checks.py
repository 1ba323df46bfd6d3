"""Tests of the checksums that compare the initial weights of ranks."""

from __future__ import annotations

import torch

from lightning_pipes.trainer.checks import checksum_tensors


def test_checksums_see_values_places_and_signs() -> None:
    ones = torch.ones(1001)
    moved = torch.arange(9.0)[[1, 0, *range(2, 9)]]
    different = [
        [ones],
        [2 * ones],
        [-ones],
        [torch.arange(9.0)],
        [moved],
        [ones, torch.zeros(2)],
        [torch.zeros(2), ones],
    ]
    assert len({checksum_tensors(tensors) for tensors in different}) == len(different)
    assert checksum_tensors([torch.arange(12.0)[3:6]]) == checksum_tensors([torch.arange(3.0, 6.0)])
