"""The values of buffers before each forward are kept for later."""

from __future__ import annotations

import pytest

from lightning_pipes.engine.compute.weights import MAX_COPIED_ELEMENTS, BuffersBefore
from tests.engine.compute.buffers import layer


def test_values_that_a_forward_changes_are_kept_once():
    """For each forward, only the buffers that it changed are kept, with their earlier values."""
    module, buffers = layer(), BuffersBefore()
    with buffers.keep_before("first", 0, module):
        module.mean.add_(1)
    with buffers.keep_before("second", 0, module):
        module.mean = module.mean + 1
    with buffers.keep_before("third", 0, module):
        pass
    assert {name: float(b) for name, b in buffers.take_kept("first").items()} == {"mean": 0.0}
    assert {name: float(b) for name, b in buffers.take_kept("second").items()} == {"mean": 1.0}
    assert buffers.take_kept("first") == buffers.take_kept("third") == {}


def test_a_large_buffer_that_changes_late_is_warned_of():
    module, buffers = layer(MAX_COPIED_ELEMENTS + 1), BuffersBefore()
    with buffers.keep_before("first", 0, module):
        pass
    told = "layer 0 changes its buffer 'mean' in place for the first time"
    with pytest.warns(UserWarning, match=told), buffers.keep_before("second", 0, module):
        module.mean.add_(1)
    buffers.take_kept("second")
    with buffers.keep_before("third", 0, module):
        module.mean.add_(1)
    assert float(buffers.take_kept("third")["mean"][0]) == 1.0
