"""Check measured layers as networks, with a stage of known times and with tables by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.papers.umpipe import measured
from benchmarks.papers.umpipe.measured import (
    BANDWIDTH,
    LATENCY,
    Curve,
    classifying_layer,
    cnn_layers,
    drawn_cnn_layers,
    gpt_layers,
    measure_layers,
    network_from_curves,
    vgg_layers,
)

ONE_IMAGE = torch.ones(1, 1, 28, 28)


class Working(torch.autograd.Function):
    """A function that takes 4 s of processor time per sample and 1 s for its gradient.

    The first call in a process takes 10 s more.
    """

    processor_seconds = 0.0
    n_runs = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.rows, Working.n_runs = len(x), Working.n_runs + 1
        Working.processor_seconds += 4.0 * len(x) + (10.0 if Working.n_runs == 1 else 0.0)
        return 2 * x[:, :2]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Working.processor_seconds += 1.0 * ctx.rows
        return gradient.new_zeros(ctx.rows, 3)


class WorkingLayer(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Working.apply(x)


def test_processor_time_of_a_stage_is_measured(monkeypatch):
    monkeypatch.setattr(measured, "time", SimpleNamespace(thread_time=lambda: Working.processor_seconds))
    layer = WorkingLayer()
    first, again = measure_layers([layer, layer], [torch.ones(n, 3) for n in (1, 2)])
    assert first is again
    assert first == Curve((4.0, 8.0), (1.0, 2.0), 8)


def test_networks_have_stages_and_links_in_the_order_of_their_direction():
    curves = [Curve((1e-3, 2e-3), (4e-3, 5e-3), BANDWIDTH * 1e-4), Curve((3e-3, 6e-3), (7e-3, 9e-3), 4)]
    network = network_from_curves(curves, (1, 2))
    link = [round(1e6 * LATENCY) + 200, round(1e6 * LATENCY) + 100]
    assert network.sizes == (2, 1)
    assert network.forward.tolist() == [[2000, 1000], link, [6000, 3000]]
    assert network.backward.tolist() == [[9000, 7000], link, [5000, 4000]]


@pytest.mark.parametrize(
    ("layers", "x", "stages", "out"),
    [
        (gpt_layers(8, words=20), torch.ones(2, 3, dtype=torch.long), 14, (2, 3, 20)),
        (vgg_layers(2), torch.ones(2, 3, 32, 32), 16, (2, 10)),
        (cnn_layers(20), torch.ones(2, 3, 32, 32), 20, (2, 128, 1, 1)),
        ([*drawn_cnn_layers(4), classifying_layer(drawn_cnn_layers(4)[-1][0].out_channels)], ONE_IMAGE, 5, (1, 10)),
    ],
    ids=["gpt", "vgg", "cnn", "drawn"],
)
def test_layers_are_those_of_the_papers_networks(layers, x, stages, out):
    assert len(layers) == stages
    for layer in layers:
        x = layer(x)
    assert tuple(x.shape) == out
