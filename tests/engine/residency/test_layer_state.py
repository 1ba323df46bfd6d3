"""Checksums with which ranks compare their states of a layer."""

from __future__ import annotations

import random

import torch
from torch import nn

from lightning_pipes.engine.residency.layer_state import LayerState, tensor_checksum
from tests.cases import for_each


@for_each("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
@for_each("size", [0, 1, 7, 2**18 + 3])
def test_equal_values_have_equal_sums_however_they_lie(dtype: torch.dtype, size: int) -> None:
    """The checksum of a tensor does not depend on its strides."""
    values = (torch.randn(size, 2, generator=torch.Generator().manual_seed(size)) * 100).to(dtype)
    assert tensor_checksum(values) == tensor_checksum(values.t().contiguous().t()) == tensor_checksum(values.clone())


def test_any_bit_and_any_order_makes_another_sum() -> None:
    """The checksum changes if one bit is flipped or two values are exchanged."""
    rng = random.Random(1)
    values = torch.randn(2**19 + 3, generator=torch.Generator().manual_seed(1))
    seen = {tensor_checksum(values)}
    for n in range(64):
        other = values.clone()
        words = other.view(torch.uint8)
        words[rng.randrange(len(words))] ^= 1 << n % 8
        seen.add(tensor_checksum(other))
    for _ in range(32):
        a, b = rng.sample(range(len(values)), 2)
        other = values.clone()
        other[a], other[b] = values[b], values[a]
        seen.add(tensor_checksum(other))
    assert len(seen) == 1 + 64 + 32


def trained(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a layer and its optimizer after some steps."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(layer.parameters())
    for _ in range(steps):
        layer(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return layer, optimizer


def test_a_layer_is_told_from_another_by_weights_and_optimizer_states() -> None:
    """The checksum of a layer depends on weights and optimizer states, but not on running statistics."""
    layer, optimizer = trained(3)
    before = LayerState.from_layer(layer, [optimizer]).state_checksum()
    layer(torch.randn(4, 3))  # changes only running averages
    assert LayerState.from_layer(layer, [optimizer]).state_checksum() == before
    (*_, last) = optimizer.state.values()
    last["exp_avg"][0] += 1
    assert LayerState.from_layer(layer, [optimizer]).state_checksum() != before
    last["exp_avg"][0] -= 1
    next(layer.parameters()).data[0, 0] += 1
    assert LayerState.from_layer(layer, [optimizer]).state_checksum() != before


def test_the_rest_of_a_layer_joins_what_came_before() -> None:
    """`with_other_state` combines an earlier state without gradients with the gradients, buffers and training modes."""
    layer, optimizer = trained(2)
    early = LayerState.from_layer(layer, [optimizer], gradients=False)
    layer(torch.randn(4, 3)).sum().backward()
    layer.eval()
    found = early.with_other_state(LayerState.from_layer(layer, [optimizer]).other_state)
    assert not any(found.training.values())
    assert all(found.parameters[n][2] is p.grad for n, p in layer.named_parameters())
    assert torch.equal(found.buffers["1.running_mean"], dict(layer.named_buffers())["1.running_mean"])
    assert found.optimizers is early.optimizers
