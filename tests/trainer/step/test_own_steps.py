"""Steps of some parameters are those that an optimizer makes where the others have no gradient."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_pipes.trainer.step.uses import PartialSteps


def layers() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(3, 3) for _ in range(6))


def adam(of: nn.ModuleList) -> torch.optim.Optimizer:
    parts = [[p for n, p in of.named_parameters() if n.endswith(end)] for end in ("weight", "bias")]
    return torch.optim.Adam([{"params": parts[0], "weight_decay": 0.1}, {"params": parts[1], "lr": 0.5}])


def test_steps_are_those_of_what_has_gradients() -> None:
    ours, theirs = layers(), layers()
    own, plain = adam(ours), adam(theirs)
    steps = PartialSteps([own])
    for number, chosen in enumerate([(0, 3), (3, 5), (1,), (0, 3)]):
        for each in (ours, theirs):
            x = torch.full((2, 3), float(number + 1))
            sum(each[n](x).square().sum() for n in chosen).backward()
        others = [p for n, layer in enumerate(ours) if n not in chosen for p in layer.parameters()]
        for p in others:
            p.grad = torch.ones_like(p)  # of batches under way
        with steps.restrict_optimizer(0, own, [p for n in reversed(chosen) for p in ours[n].parameters()]):
            assert [len(group["params"]) for group in own.param_groups] == [len(chosen)] * 2
            own.step()
            own.zero_grad()
        plain.step()
        plain.zero_grad()
        assert all(p.grad is not None for p in others)
        assert all(p.grad is None for n in chosen for p in ours[n].parameters())
        for p in others:
            p.grad = None
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert str(own.state_dict()) == str(plain.state_dict())


def test_all_is_as_before_after_a_failure() -> None:
    optimizer = adam(layers())
    before = [list(group["params"]) for group in copy.copy(optimizer.param_groups)]
    strange = nn.Parameter(torch.zeros(1))

    def failing() -> None:
        with PartialSteps([optimizer]).restrict_optimizer(0, optimizer, [strange]):
            assert [group["params"] for group in optimizer.param_groups] == [[], []]
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        failing()
    assert all(
        a is b for x, y in zip(before, optimizer.param_groups, strict=True) for a, b in zip(x, y["params"], strict=True)
    )
