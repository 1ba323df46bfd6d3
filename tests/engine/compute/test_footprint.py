"""Tensors that autograd saves are found, and no reference to them remains."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from lightning_pipes.engine.compute.footprint import saved_for_backward, storage_of


def test_nothing_outlives_a_graph_of_which_a_part_has_no_backward() -> None:
    """No tensor stays alive if a part of the graph never runs backward, such as a metric that is logged with its graph.

    The garbage collector cannot find cycles through the objects of autograd.
    """
    layer, x = nn.Linear(3, 3), torch.ones(2, 3)
    with saved_for_backward() as found:
        y = layer(x).tanh()
        logged = y.exp()
    assert {storage_of(y), storage_of(logged)} <= found.keys()
    kept = [weakref.ref(t.untyped_storage()) for t in (y, logged)]
    alive = [weakref.ref(t) for t in found.values()]
    y.sum().backward()
    gradient = layer.weight.grad
    layer.weight.grad = None
    layer(x).tanh().sum().backward()
    assert torch.equal(gradient, layer.weight.grad)  # type: ignore[arg-type]
    del y, logged, found
    assert [ref() for ref in alive] == [None] * len(alive)
    assert [ref() for ref in kept] == [None, None]
