"""Restrictions of forwards that run again in parts."""

from __future__ import annotations

import pytest
import torch

from lightning_pipes.engine.compute.stage import SampleIndependenceCheck
from lightning_pipes.ir import PlanError, Span
from tests.engine.compute.buffers import layer


def test_a_forward_that_runs_again_in_parts_may_change_no_buffer():
    module, watch = layer(), SampleIndependenceCheck(1, Span(0, 4), torch.device("cpu"))
    with watch.check_buffers(2, module):
        pass
    with pytest.raises(PlanError, match="layer 2 changes its buffer 'mean'"), watch.check_buffers(2, module):
        module.mean.add_(1)
