"""Tests of the batches that the steps of a stage get."""

from __future__ import annotations

import torch

from lightning_pipes.ir import Span
from lightning_pipes.trainer.cuts.steps import TrainingBatch


def test_a_part_that_was_cut_ahead_is_handed_out_once():
    x = torch.arange(6.0)
    data = TrainingBatch({"x": x, "more": [x, "name"]}, 6, (), 1)
    data.cut([Span(0, 2), Span(2, 6)])
    first = data.select_samples(Span(2, 6))
    first["more"].clear()  # as a step may do
    del first["x"]
    again = data.select_samples(Span(2, 6))
    assert torch.equal(again["x"], x[2:])
    assert torch.equal(again["more"][0], x[2:])
    assert again["more"][1] == "name"
    assert torch.equal(data.select_samples(Span(1, 4))["x"], x[1:4])  # this span was not cut in advance
