"""Layers are moved to the device for each task; the hit rate counts changes to another batch or direction."""

from __future__ import annotations

import torch
from torch import nn

from lightning_pipes import MemorySwap
from lightning_pipes.engine.compute.layer_parameters import LayerOffload, LayerParameters
from lightning_pipes.engine.compute.spans import Item
from lightning_pipes.engine.residency.layer_memory import LayerMemory
from lightning_pipes.ir import Kind, LayerUse, Span

LAYERS = (Span(0, 1),)


class Counting(nn.Module):
    """A layer that replaces its buffer by another tensor in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))

    def forward(self) -> None:
        self.count = self.count + 1


def test_buffers_that_a_forward_replaces_leave_the_device_with_their_values() -> None:
    block = nn.ModuleList(Counting() for _ in range(3))
    memory = MemorySwap(1100, prefetch=False)
    memory._poison = True
    layers = LayerMemory(memory, torch.device("cpu"), list)
    turns = LayerOffload(layers, 0, LayerParameters(0, {0: block}), recompute=True)
    for number in (0, 1, 2, 0, 1, 2, 0):
        item = Item(number, 4, use=LayerUse.from_names([f"0.{number}"], LAYERS))
        assert item.use is not None
        turns.enter(item.use)
        with turns.task_context(Kind.F, item):
            block[number]()
    layers.close()
    assert [float(layer.count[0]) for layer in block] == [3, 2, 2]
    assert memory.statistics.misses > 3


def test_micro_batches_of_a_batch_count_once() -> None:
    """The hit rate leaves out hits of later micro-batches of the same batch in the same direction."""
    block = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    memory = MemorySwap(10**6, prefetch=False)
    layers = LayerMemory(memory, torch.device("cpu"), lambda: [torch.optim.SGD(block.parameters())])
    turns = LayerOffload(layers, 0, LayerParameters(0, {0: block}), recompute=True)
    items = [Item(number, 4, use=LayerUse.from_names([f"0.{number}"], LAYERS)) for number in range(2)]
    for item in items:
        assert item.use is not None
        turns.enter(item.use)
    for kind, number in [(Kind.F, 0)] * 4 + [(Kind.F, 1)] * 4 + [(Kind.B, 1)] * 3 + [(Kind.STEP, 1), (Kind.F, 0)]:
        with turns.task_context(kind, items[number]):
            pass
    found = memory.statistics
    assert (found.misses, found.hits, found.again) == (2, 11, 9)
    assert found.hit_rate == 2 / 4  # two forwards missed their layers; a backward and a later forward found them
    layers.close()
    memory.close()
