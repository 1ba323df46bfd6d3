"""Siblings whose weights and optimizers are swapped on a GPU give the same results as without swapping."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_pipes import JobArray, MemorySwap
from lightning_pipes.testing.ranks import run_ranks
from tests.arrays.jobs import Job, assert_equal, told_text
from tests.trainer.lit import quiet

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def with_and_without(rank: int, jobs: list[Job], size: int, prefetch: bool) -> Any:
    """Return the results of jobs with and without swapping, and the statistics of swapping."""
    quiet()
    memory = MemorySwap(1 << 30, slots=2, prefetch=prefetch)
    memory._poison = True
    found = [
        [(o.index, o.value, told_text(o.error)) for o in JobArray(size, memory=m).run(jobs)] for m in (memory, None)
    ]
    return found[0], found[1], memory.statistics


@pytest.mark.parametrize("width", [6, 1024])
@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_bit_for_bit(ranks: int, prefetch: bool, width: int) -> None:
    """The results are the same bit by bit for six jobs, of which one joins late, one ends early and one fails.

    Another job clips its gradients, and batch sizes differ.
    """
    jobs = [
        Job(0, gpu=True, width=width),
        Job(1, gpu=True, width=width, batch=16),
        Job(2, gpu=True, width=width, patience=0, epochs=4),
        Job(3, gpu=True, width=width, harm="loss"),
        Job(4, gpu=True, width=width, batch=5, clip=0.1),
        Job(5, gpu=True, width=width, recompute=True),
    ]
    for swapped, plain, found in run_ranks(with_and_without, ranks, jobs, 5, prefetch, timeout=300):
        values = {index: value for index, value, _ in swapped}
        assert {index: error for index, _, error in swapped} == {index: error for index, _, error in plain}
        for index, value, error in plain:
            assert error or value is not None
            if not error:
                assert_equal(values[index], value)
        assert found.bytes_in > 20 * 1000
        assert found.bytes_out > 0
