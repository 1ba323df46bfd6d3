"""Buckets of gradients are summed over replicas, also while backward still runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_pipes.engine.compute.reducer import Bucket, Reducer, TrainableParameters, Wait, make_buckets
from lightning_pipes.ir import PipelineError


class Network:
    """An all-reduce with an emulated second rank, whose gradients are three times the gradients of this rank.

    The sum is computed when the caller waits for it.
    """

    def __init__(self) -> None:
        self.started: list[torch.Tensor] = []

    def all_reduce(self, flat: torch.Tensor) -> Wait:
        self.started.append(flat)
        return lambda: flat.mul_(4)


def layers(n: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(3, 3).double() for _ in range(n)))


def gradients(module: nn.Module) -> list[Any]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def test_buckets_start_from_the_end_and_keep_types_apart():
    a, b, c = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2).double())
    found = [bucket.parameters for bucket in make_buckets([a, b, c], size=32)]
    assert [[id(p) for p in ps] for ps in found] == [[id(b), id(a)], [id(c)]]
    assert [len(bucket.parameters) for bucket in make_buckets([a, b, c], size=1)] == [1, 1, 1]


def test_parameters_that_were_trainable_stay_known():
    a, b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4), requires_grad=False)
    trained = TrainableParameters([a, b])
    a.requires_grad_(False)
    assert (trained.is_known(a), trained.is_known(b), trained.add_trainable()) == (True, False, False)
    b.requires_grad_()
    assert (trained.add_trainable(), trained.is_known(b), trained.add_trainable()) == (True, True, False)


def test_a_bucket_sums_in_float32_at_least_and_leaves_none_as_it_is():
    """bfloat16 gradients are summed in float32, and a gradient that is None on all ranks stays None."""
    p, q, r = (nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(3))
    p.grad = torch.full_like(p, 3.0)

    def other_has_q(flat: torch.Tensor) -> Wait:
        assert flat.dtype == torch.float32
        flat += torch.tensor([1.0, 1.0, 5.0, 5.0, 0.0, 0.0, 1.0, 1.0, 0.0])
        return lambda: None

    bucket = Bucket([p, q, r])
    bucket.start(other_has_q)
    bucket.finish(2)
    assert p.grad.tolist() == [2.0, 2.0]
    assert p.grad.dtype == torch.bfloat16
    assert q.grad is not None
    assert q.grad.tolist() == [2.5, 2.5]
    assert r.grad is None


def test_the_average_and_what_leaves_before_backward_has_ended():
    """Gradients are the average over replicas, and buckets are sent while the last backward still runs."""
    network, module, plain = Network(), layers(), layers()
    reducer = Reducer({0: list(module.parameters())}, network.all_reduce, replicas=2, size=90)
    x = torch.randn(5, 3, dtype=torch.float64)
    plain(x).square().sum().backward()
    plain(2 * x).square().sum().backward()

    module(x).square().sum().backward()  # not the last backward, so no bucket is sent
    assert not network.started
    on_the_way: list[int] = []
    module[0].weight.register_hook(lambda g: on_the_way.append(len(network.started)))
    with reducer.last_backward(0):
        module(2 * x).square().sum().backward()
    assert on_the_way == [3]  # layers 3, 2 and 1, while layer 0 ran backward
    reducer.finish()
    for mine, whole in zip(gradients(module), gradients(plain), strict=True):
        assert torch.allclose(mine, 2 * whole, rtol=0, atol=1e-12)

    reducer.remove()
    assert not any(p._post_accumulate_grad_hooks for p in module.parameters())


def test_buckets_leave_in_one_order_whatever_backward_does():
    """Buckets are sent in a fixed order, also if backward reaches only some of the layers."""
    network, module = Network(), layers(3)
    reducer = Reducer({0: list(module.parameters())}, network.all_reduce, replicas=2, size=90)
    with reducer.last_backward(0):  # only the first layer, whose bucket must wait for the buckets before it
        module[0](torch.ones(1, 3, dtype=torch.float64)).sum().backward()
        assert not network.started
    assert [t[-1].item() for t in network.started] == [0.0, 0.0, 1.0]
    reducer.finish()
    assert [g is None for g in gradients(module)] == [False, False, True, True, True, True]


def test_gradients_that_cannot_be_reduced():
    embedding = nn.Embedding(4, 2, sparse=True)
    reducer = Reducer({0: list(embedding.parameters())}, Network().all_reduce, replicas=2)
    with pytest.raises(PipelineError, match=r"shape \(4, 2\) .*sparse_coo.*Use sparse=False"):  # noqa: SIM117
        with reducer.last_backward(0):
            embedding(torch.tensor([1])).sum().backward()

    layer = nn.Linear(2, 2)
    reducer = Reducer({0: list(layer.parameters())}, Network().all_reduce, replicas=2)
    x = torch.ones(1, 2, requires_grad=True)
    y = checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True)
    with pytest.raises(PipelineError, match="comes in several parts"), reducer.last_backward(0):
        y.sum().backward()
