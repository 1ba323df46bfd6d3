"""`RngUse` detects whether code between two points has drawn random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from lightning_pipes.engine.compute.rng import RngUse

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("draw", "used"),
    [
        (lambda: None, False),
        (lambda: torch.rand(1), True),
        (lambda: torch.randn(1), True),
        (random.random, True),
        (lambda: random.gauss(0, 1), True),
        (np.random.rand, True),
        (np.random.randn, True),
    ],
)
def test_draws_of_every_generator_are_seen(draw: Callable[[], object], used: bool) -> None:
    found = RngUse(CPU)
    found.start()
    draw()
    found.stop()
    assert found.was_used == used


def test_equal_states_are_equal() -> None:
    """If the code sets the generator back to its earlier state, no use is detected."""
    found = RngUse(CPU)
    random.seed(1)
    found.start()
    random.random()
    random.seed(1)
    found.stop()
    assert not found.was_used
