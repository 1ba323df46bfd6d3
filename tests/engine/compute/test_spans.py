"""Rows of what travels between stages that cut a batch differently."""

from __future__ import annotations

import pytest
import torch

from lightning_pipes.engine.compute.spans import join_rows, take_rows
from lightning_pipes.ir import PlanError, Span


def test_a_list_with_a_tensor_for_each_sample_is_refused():
    """Every part would get all of its tensors, and pair them with other samples."""
    x, boxes, tables = torch.zeros(2, 3), [torch.zeros(1, 4), torch.zeros(3, 4)], (torch.zeros(5), torch.zeros(5))
    whole, first, second = Span(0, 2), Span(0, 1), Span(1, 2)
    assert take_rows((x, boxes), whole, whole) == (x, boxes)  # cut alike: all of it goes on
    assert take_rows((x, tables), whole, first)[1] == tables  # what all samples have in common
    with pytest.raises(PlanError, match="a list with a tensor for each of 2 samples"):
        take_rows((x, boxes), whole, first)
    with pytest.raises(PlanError, match="a list with a tensor for each of 2 samples"):
        join_rows([(whole, (x, boxes)), (Span(2, 4), (x, boxes))])
    assert join_rows([(first, x[:1]), (second, x[1:])]).shape == (2, 3)
