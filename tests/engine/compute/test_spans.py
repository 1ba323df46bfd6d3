"""Rows of messages between stages that divide a batch differently."""

from __future__ import annotations

import pytest
import torch

from lightning_pipes.engine.compute.spans import SpanBuffer, join_rows, mark_unsampled, remove_marks, take_rows
from lightning_pipes.ir import PlanError, Span
from tests.cases import for_each


def test_a_list_with_a_tensor_for_each_sample_is_refused():
    """Such a list is refused, because each part would receive all tensors and combine them with the wrong samples."""
    x, boxes, tables = torch.zeros(2, 3), [torch.zeros(1, 4), torch.zeros(3, 4)], (torch.zeros(5), torch.zeros(5))
    whole, first, second = Span(0, 2), Span(0, 1), Span(1, 2)
    assert take_rows((x, boxes), whole, whole) == (x, boxes)  # equal spans pass everything on
    assert remove_marks(take_rows((x, tables), whole, first))[0][1] == tables  # shared by all samples
    with pytest.raises(PlanError, match="a list with a tensor for each of 2 samples"):
        take_rows((x, boxes), whole, first)
    with pytest.raises(PlanError, match="a list with a tensor for each of 2 samples"):
        join_rows([(whole, (x, boxes)), (Span(2, 4), (x, boxes))])
    assert join_rows([(first, x[:1]), (second, x[1:])]).shape == (2, 3)


SENT = [Span(0, 3), Span(3, 4), Span(4, 6)]
CUTS = [
    (SENT, [Span(0, 2), Span(2, 6)]),
    ([Span(0, 3), Span(3, 6)], [Span(0, 2), Span(2, 4), Span(4, 6)]),  # spans of both stages overlap by one sample
]


@for_each("cuts", CUTS)
@for_each("shape", [(), (1,), (2,), (1, 2)])
def test_auxiliary_losses_of_stages_that_cut_differently(cuts, shape):
    """Auxiliary losses are averaged over samples, and each part of their gradient arrives exactly once.

    This also holds if a value has the same number of entries as some of the spans have samples.
    """
    sent, needed = cuts
    values = torch.arange(2.0, 2.0 + len(sent), dtype=torch.float64, requires_grad=True)
    forward, backward = SpanBuffer(gradients=False), SpanBuffer(gradients=True)
    for span, value in zip(sent, (each.expand(shape) for each in values), strict=True):
        forward.put(span, (torch.ones(span.rows, 2, dtype=torch.float64), value, None, "text"))
    loss = torch.zeros((), dtype=torch.float64)
    for span in needed:
        (x, value, nothing, text), _ = remove_marks(forward.take_span(span))
        assert (len(x), value.shape, nothing, text) == (span.rows, shape, None, "text")
        common = [(max(span.start, s.start), min(span.stop, s.stop)) for s in sent]
        rows = torch.tensor([max(stop - start, 0) for start, stop in common], dtype=torch.float64)
        assert value.detach().unique().tolist() == pytest.approx([float(values.detach() @ rows) / span.rows])
        loss = loss + value.mean() * span.rows / 6
        of_mean = torch.full(shape, span.rows / 6 / value.numel(), dtype=torch.float64)
        backward.put(span, [torch.zeros_like(x), of_mean])
    gradients = [float(remove_marks(backward.take_span(span))[0][1].sum()) for span in sent]
    assert gradients == pytest.approx([span.rows / 6 for span in sent])
    (of_graph,) = torch.autograd.grad(loss, values)
    assert gradients == pytest.approx(of_graph.tolist())


def test_values_that_can_not_be_averaged_are_refused():
    """Tensors without samples on axis 0 and integers that differ are refused; equal masks are accepted."""
    with pytest.raises(PlanError, match=r"shapes \(5, 3\), \(5, 1\).*need their samples on axis 0"):
        join_rows([(SENT[0], torch.zeros(5, 3)), (SENT[1], torch.zeros(5, 1))])
    with pytest.raises(PlanError, match=r"torch\.int64 tensor of shape .* differ"):
        join_rows([(SENT[0], torch.tensor(3)), (SENT[1], torch.tensor(1))])
    mask = torch.ones(5, 5, dtype=torch.bool)
    assert remove_marks(join_rows([(SENT[0], mask), (SENT[1], mask.clone())]))[0] is mask


@for_each(("sent", "needed"), [([Span(0, 4)], [Span(0, 2), Span(2, 4)]), ([Span(0, 4), Span(4, 8)], [Span(0, 8)])])
def test_a_marked_table_is_neither_cut_nor_joined(sent, needed):
    """A marked table is passed on whole although its length equals the number of samples of each sent span.

    Each part of its gradient counts once.
    """
    table = torch.arange(4.0, dtype=torch.float64)
    forward, backward = SpanBuffer(gradients=False), SpanBuffer(gradients=True)
    for span in sent:
        forward.put(span, mark_unsampled((torch.ones(span.rows, 2, dtype=torch.float64), table), {id(table)}))
    for span in needed:
        (x, found), marked = remove_marks(forward.take_span(span))
        assert len(x) == span.rows
        assert torch.equal(found, table)
        assert marked == {id(found)}
        gradient = table * span.rows
        backward.put(span, mark_unsampled([torch.zeros_like(x), gradient], {id(gradient)}))
    for span in sent:
        (of_x, of_table), _ = remove_marks(backward.take_span(span))
        assert len(of_x) == span.rows
        assert torch.equal(of_table, table * span.rows)
