"""The context that restores a user's module after a block."""

from __future__ import annotations

import torch
from torch import nn

from lightning_pipes.engine.residency.binding import Binding
from lightning_pipes.trainer.user.unchanged import keep_unchanged


def test_weights_and_buffers_that_get_other_memory_in_the_block() -> None:
    """Weights and buffers that move in the block keep the new memory, and nothing is written to the old memory.

    A state of `MemorySwap` is moved like this if its sibling waits for the other ranks in the block. The old memory may
    then hold the state of another sibling.
    """
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    binding = Binding(module, (), torch.device("cpu"))
    before = binding.named_tensors()
    wanted = {name: t.clone() for name, t in module.state_dict().items()}
    gradient = module[0].weight.grad = torch.ones(3, 2)
    with keep_unchanged(module, weights=False, moves=True):
        module(torch.randn(4, 2))  # changes the running statistics
        moved = {name: t.clone() for name, t in before.items()}
        binding.bind_tensors(moved)
        for old in before.values():
            old.fill_(7)
        module[1].extra = torch.ones(1)
    assert {name: t.data_ptr() for name, t in binding.named_tensors().items()} == {
        n: t.data_ptr() for n, t in moved.items()
    }
    assert all((old == 7).all() for old in before.values())
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name
    assert module[0].weight.grad is gradient
    assert not hasattr(module[1], "extra")
