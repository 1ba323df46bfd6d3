"""Weight versions that are swapped on a GPU give the same weights as versions that stay there."""

from __future__ import annotations

from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from lightning_pipes.testing.ranks import run_ranks
from tests.trainer.lit import differences
from tests.trainer.stashes import Stashing, fit, turning

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def with_and_without(rank: int, case: Stashing, folder: str) -> list[dict[str, Any]]:
    return [fit(case, f"{folder}/{n}", memory) for n, memory in enumerate((None, turning(1)))]


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_2bw", "dynpipe"])
def test_bit_for_bit(schedule: str) -> None:
    """Swapped versions give the same weights bit by bit."""
    case = Stashing(3, schedule, 2 if schedule == "pipedream_2bw" else 1, {"val_check_interval": 5}, gpu=True)
    *_, first = found = run_ranks(with_and_without, 3, case, mkdtemp(), timeout=200)
    for plain, turned in found:
        assert differences(turned["weights"], plain["weights"], tolerance=0) == []
    assert (first[1]["statistics"].bytes_in > 0) == (schedule != "pipedream_2bw")
