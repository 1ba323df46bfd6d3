"""Tests that a whole batch draws the same random numbers as its micro-batches."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_pipes.engine.compute.rng import forked_rng, seed_for_layer, stream_seed
from lightning_pipes.ir import Span
from lightning_pipes.trainer.verify.sample_draws import SampleDraws, sample_axis

CPU = torch.device("cpu")
SPANS = [Span(0, 3), Span(3, 4), Span(4, 8)]
CODE = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "twice": lambda x: F.dropout(F.dropout(x, 0.2).tanh(), 0.5),
    "noise like": lambda x: x + torch.randn_like(x),
    "noise of a shape": lambda x: x + torch.randn(len(x), x.size(1)) * torch.rand(len(x), 1),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "in place": lambda x: torch.empty_like(x).uniform_(2, 3),
    "multinomial": lambda x: torch.multinomial(x.softmax(1), 2),
    "integers": lambda x: torch.randint(0, 9, (len(x), 2)),
    "several entries a sample": lambda x: F.dropout(x.view(-1, 2), 0.5).view(len(x), -1),
    "feature": lambda x: F.dropout1d(x[:, :, None].expand(-1, -1, 4), 0.5),
    "samples on axis 1": lambda x: F.dropout(x.t(), 0.5).t(),
    "leaky": lambda x: F.rrelu(x, training=True),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(len(x), 1, 3, 2)] * 3, dropout_p=0.5).flatten(1),
}


@pytest.mark.parametrize("name", CODE)
def test_numbers_are_those_of_the_spans(name):
    x = torch.randn(8, 6)
    if name == "samples on axis 1":
        x = torch.randn(8, 5)
    draws = SampleDraws(CPU)
    draws.begin_batch(7, 0, 5, 8)
    before = torch.get_rng_state()
    with draws.draw_by_sample():
        draws.enter(2, SPANS)
        whole = CODE[name](x)
    assert torch.equal(before, torch.get_rng_state())
    parts = []
    for span in SPANS:
        with forked_rng(CPU):
            seed_for_layer(2, stream_seed(7, 0, 2, 5, span), CPU)
            parts.append(CODE[name](x[span.start : span.stop].clone()))
    assert torch.equal(whole, torch.cat(parts))
    assert draws.common == []


def test_number_for_the_whole_batch_is_reported():
    draws = SampleDraws(CPU)
    draws.begin_batch(7, 0, 5, 8)
    with draws.draw_by_sample():
        draws.enter(2, SPANS)
        torch.rand(())
        torch.randn(3)
    assert [name.split(".")[1] for name in draws.common] == ["rand", "randn"]


def test_repeated_code_draws_again():
    layer = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))
    gradients = []
    for again in (False, True):
        draws = SampleDraws(CPU)
        draws.begin_batch(7, 0, 5, 8)
        x = torch.ones(8, 6)
        layer.zero_grad()
        with draws.draw_by_sample():
            draws.enter(2, SPANS)
            y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if again else layer(x)
            F.dropout(y, 0.5)  # other code draws numbers in the meantime
        with draws.draw_by_sample():
            y.square().sum().backward()
        gradients.append(layer[0].weight.grad.clone())
    assert torch.equal(*gradients)


def test_generators_of_their_own_and_seeds_of_the_user_are_left_alone():
    draws = SampleDraws(CPU)
    draws.begin_batch(7, 0, 5, 8)
    own = torch.Generator().manual_seed(3)
    with draws.draw_by_sample():
        draws.enter(2, SPANS)
        first = torch.randn(8, generator=own)
        torch.manual_seed(3)
        second = torch.randn(8)
    assert torch.equal(first, second)


def test_sample_axis():
    assert sample_axis((8, 3), 8) == 0
    assert sample_axis((24, 3), 8) == 0
    assert sample_axis((5, 8), 8) == 1
    assert sample_axis((5, 7), 8) is None
    assert sample_axis((), 8) is None
    assert sample_axis((0, 3), 8) is None
