"""Check the properties of generated networks, and that a seed determines them."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_pipes.ir import InputError
from tests.strategies.umpipe.synthetic_networks import powers_of_two, realistic, simulated


def test_simulation_networks() -> None:
    tables = simulated(10, 512, 3)
    assert tables.forward.shape == tables.backward.shape == (19, 512)
    assert (tables.forward.min(), tables.forward.max()) == (1, 100)
    assert abs(tables.forward.mean() - 50.5) < 1
    assert np.array_equal(tables.forward, simulated(10, 512, 3).forward)
    assert not np.array_equal(tables.forward, simulated(10, 512, 4).forward)
    assert len(tables.network.sizes) == 45  # of 512 counts
    assert tables.network.counts.max() == 512


def test_monotone_ones_have_the_same_times_in_order() -> None:
    plain, sorted_ = simulated(3, 16, 1), simulated(3, 16, 1, monotone=True)
    assert np.array_equal(np.sort(plain.forward)[:, ::-1], sorted_.forward)
    assert (np.diff(sorted_.network.forward) <= 0).all()


def test_realistic_ones() -> None:
    network = realistic(4, 512, 2, spread=0).network
    by_size = {size: network.forward[:, q].tolist() for q, size in enumerate(network.sizes)}
    assert by_size[512] == [1020, 305, 1020, 305, 1020, 305, 1020]
    assert by_size[256] == [520, 155, 520, 155, 520, 155, 520]
    assert by_size[4] == [28, 7, 28, 7, 28, 7, 28]
    assert by_size[1] == [28, 6, 28, 6, 28, 6, 28]  # links have no minimum time for small sizes
    assert network.backward[0, 0] == 2020
    assert (np.diff(network.forward) <= 0).all()
    assert not np.array_equal(realistic(4, 512, 2).forward, realistic(4, 512, 3).forward)


def test_option_sets() -> None:
    assert powers_of_two(64) == (1, 2, 4, 8, 16, 32, 64)
    assert powers_of_two(48) == (1, 2, 4, 8, 16, 32)
    assert simulated(2, 64, counts=powers_of_two(64)).network.sizes == (64, 32, 16, 8, 4, 2, 1)


def test_mistakes() -> None:
    for counts in ((), (0, 1), (2, 1), (1, 9)):
        with pytest.raises(InputError, match="must rise from 1 or more to at most 8"):
            simulated(2, 8, counts=counts)
    with pytest.raises(InputError, match="spread"):
        realistic(2, 8, spread=-1)
