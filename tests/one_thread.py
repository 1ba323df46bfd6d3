"""Sums on one thread, as on the ranks: on two they are others in their last bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Torch computes on one thread within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For every test of a file that imports it."""
    with on_one_thread():
        yield
