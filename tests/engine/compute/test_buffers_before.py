"""Buffers of layers whose forward runs twice."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_pipes.engine.compute.sample_independence import SampleIndependenceCheck
from lightning_pipes.engine.compute.weights import SMALL, BuffersBefore
from lightning_pipes.ir import PlanError, Span


def layer(size: int = 1) -> nn.Module:
    module = nn.Module()
    module.register_buffer("kept", torch.zeros(size))
    module.register_buffer("mean", torch.zeros(size))
    return module


def test_what_a_forward_changes_is_kept_once_as_it_was():
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
    module, buffers = layer(SMALL + 1), BuffersBefore()
    with buffers.keep_before("first", 0, module):
        pass
    told = "layer 0 changes its buffer 'mean' in place for the first time"
    with pytest.warns(UserWarning, match=told), buffers.keep_before("second", 0, module):
        module.mean.add_(1)
    buffers.take_kept("second")
    with buffers.keep_before("third", 0, module):
        module.mean.add_(1)
    assert float(buffers.take_kept("third")["mean"][0]) == 1.0


def test_a_forward_that_runs_again_in_parts_may_change_no_buffer():
    module, watch = layer(), SampleIndependenceCheck(1, Span(0, 4), torch.device("cpu"))
    with watch.check_buffers(2, module):
        pass
    with pytest.raises(PlanError, match="layer 2 changes its buffer 'mean'"), watch.check_buffers(2, module):
        module.mean.add_(1)
