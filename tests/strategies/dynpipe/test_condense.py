from math import comb

import numpy as np
import pytest

from lightning_pipes.ir import PlanError
from lightning_pipes.strategies.dynpipe.partitions import (
    MAX_PARTITIONS,
    affordable_blocks,
    condense_layers,
    layer_weights,
)


def test_blocks_end_with_the_heaviest_layers() -> None:
    """Check that layers 1, 4 and 6 are kept as the ends of blocks.

    The layers after the last of them belong to its block.
    """
    weights = [1.0, 9.0, 2.0, 1.0, 7.0, 2.0, 5.0, 1.0, 1.0]
    assert condense_layers(weights, 3) == (2, 5)
    assert condense_layers(weights, 1) == ()
    assert condense_layers(weights, 9) == condense_layers(weights, 100) == tuple(range(1, 9))


def test_of_equally_heavy_layers_those_evenly_apart_are_kept() -> None:
    assert condense_layers([1.0] * 12, 4) == (2, 5, 8)
    noise = np.random.default_rng(0).uniform(0.98, 1.02, 12).tolist()
    assert condense_layers(noise, 4) == (2, 5, 8)
    sizes = np.diff([0, *condense_layers([1.0] * 24, 16), 24])
    assert max(sizes) <= 2 + 1


def test_layers_are_ranked_by_seconds_and_messages() -> None:
    found = layer_weights(np.array([1.0, 2.0]), np.array([10.0, 0.0]), 10.0)
    assert found == [3.0, 2.0]


@pytest.mark.parametrize(("stages", "layers"), [(2, 100), (8, 24), (16, 48), (4, 3), (64, 64)])
def test_no_more_blocks_than_can_be_gone_through(stages: int, layers: int) -> None:
    k = affordable_blocks(stages, layers)
    assert stages <= k <= max(stages, layers)
    assert comb(k - 1, stages - 1) <= MAX_PARTITIONS
    assert k >= layers or comb(k, stages - 1) > MAX_PARTITIONS


def test_a_model_has_a_block() -> None:
    with pytest.raises(PlanError, match="at least one block"):
        condense_layers([1.0], 0)
