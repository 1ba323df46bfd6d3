from __future__ import annotations

import numpy as np
import pytest

from lightning_pipes.ir import InputError
from lightning_pipes.strategies.umpipe.network import Network


def test_counts_of_one_size_are_one_option_with_the_cheapest_time() -> None:
    # 1 to 6 micro-batches of a batch of 6 have the sizes 6, 3, 2, 2, 2 and 1.
    times = np.array([[9, 8, 7, 6, 5, 4]])
    network = Network.from_counts(6, range(1, 7), times, times[:, ::-1])
    assert network.sizes == (6, 3, 2, 1)
    assert network.counts.tolist() == [1, 2, 3, 6]
    assert network.forward.tolist() == [[9, 8, 5, 4]]
    assert network.backward.tolist() == [[4, 5, 6, 9]]


def test_counts_of_a_network() -> None:
    times = np.ones((3, 2), np.int64)
    network = Network(5, (5, 2), times, times)
    assert (network.stages, network.processes, network.counts.tolist()) == (2, 3, [1, 3])


@pytest.mark.parametrize(
    ("sizes", "forward", "said"),
    [
        ((2, 4), np.ones((1, 2), int), "must descend from at most 4"),
        ((8,), np.ones((1, 1), int), "must descend from at most 4"),
        ((4, 0), np.ones((1, 2), int), "to at least 1"),
        ((4, 2), np.ones((2, 2), int), "2 N - 1 processes"),
        ((4, 2), np.ones((1, 3), int), "a column for each of 2 sizes"),
        ((4, 2), np.array([[1, -1]]), "whole numbers of at least 0"),
        ((4, 2), np.array([[1.0, np.nan]]), "without gaps"),
    ],
)
def test_mistakes(sizes: tuple[int, ...], forward: np.ndarray, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Network(4, sizes, forward, forward)


@pytest.mark.parametrize("counts", [[], [0], [5], [1, 2, 9]])
def test_counts_that_no_batch_has(counts: list[int]) -> None:
    with pytest.raises(InputError, match="1 to 4 micro-batches"):
        Network.from_counts(4, counts, np.ones((1, len(counts)), int), np.ones((1, len(counts)), int))
