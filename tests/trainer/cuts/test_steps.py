"""Tests of the batches that the steps of a stage get."""

from __future__ import annotations

import torch

from lightning_pipes.ir import PipelineError, Span
from lightning_pipes.trainer.cuts.steps import TrainingBatch
from lightning_pipes.trainer.cuts.units.steps import note_cut_tensors


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


def test_errors_of_a_part_of_a_batch_name_the_tensors_that_were_cut():
    """Check the note. An error that a whole batch would also raise, or that is explained already, gets none."""
    batch = {"x": torch.zeros(3, 7), "weights": torch.ones(3), "other": torch.ones(4), "number": torch.tensor(3)}
    cut, whole, explained = IndexError("index 2"), IndexError("index 2"), PipelineError("it is explained")
    note_cut_tensors(cut, batch, 3, Span(0, 1))
    note_cut_tensors(whole, batch, 3, Span(0, 3))
    note_cut_tensors(explained, batch, 3, Span(0, 1))
    assert "ran with 1 of the 3 samples of a batch. Its tensors of shape (3, 7), (3,) were cut" in cut.__notes__[0]
    assert not hasattr(whole, "__notes__")
    assert not hasattr(explained, "__notes__")
