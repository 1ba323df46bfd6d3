"""The roots and gradients with which the backward of a stage starts, compared with `torch.autograd.backward`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lightning_pipes.engine.compute.autograd import SavedForward, backward, leave_stage
from lightning_pipes.ir import Span


class Twice(torch.autograd.Function):
    """A function whose node in the autograd graph is implemented in Python."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


LOSSES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: (x * x).sum(),
    lambda x: (x * x).sum().reshape(1, 1),
    lambda x: Twice.apply(x).sum(),
    lambda x: Twice.apply(x.sum()),
    lambda x: (x * x).sum().bfloat16(),
]


def saved_of(out: torch.Tensor) -> SavedForward:
    """Return the saved forward of a micro-batch with one output."""
    saved = SavedForward(Span(0, 1), None)
    leave_stage(out, saved)
    return saved


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_loss_has_the_gradient_that_torch_gives_it(loss, dtype):
    ours, theirs = (torch.arange(1, 4, dtype=dtype).requires_grad_() for _ in range(2))
    backward([(saved_of(loss(ours)), ())], last=True)
    torch.autograd.backward(loss(theirs))
    assert ours.grad is not None
    assert torch.equal(ours.grad, theirs.grad)


def test_several_outputs_with_gradients_at_once():
    ours, theirs = (torch.arange(1.0, 4.0).requires_grad_() for _ in range(2))
    gradients = [torch.tensor([1.0, 0.0, 2.0]), torch.tensor(3.0)]
    saved = SavedForward(Span(0, 1), None)
    leave_stage((Twice.apply(ours), ours.exp().sum()), saved)
    backward([(saved, gradients)], last=False)
    torch.autograd.backward([Twice.apply(theirs), theirs.exp().sum()], gradients)
    assert torch.equal(ours.grad, theirs.grad)


def test_invalid_loss_is_refused_as_by_torch():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="scalar outputs"):
        backward([(saved_of(2 * x), ())], last=True)
    assert x.grad is None


def test_a_gradient_of_another_shape_is_refused():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="shape"):
        backward([(saved_of(2 * x), [torch.ones(4)])], last=False)
