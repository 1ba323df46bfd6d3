"""`Binding` detects whether a model and its optimizers still use the tensors that they were bound to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_pipes.engine.residency.binding import Binding

CPU = torch.device("cpu")
Change = Callable[[nn.Module, torch.optim.Optimizer], object]


def trained() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """Return a model and its optimizer after one step."""
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(module.parameters())
    step(module, optimizer)
    return module, optimizer


def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    module(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def forget(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def remember_otherwise(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Replace a state of the optimizer by a copy."""
    state = optimizer.state[next(module.parameters())]
    state["exp_avg"] = state["exp_avg"].clone()


def new_data(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    next(module.parameters()).data = torch.ones(3, 3)


def new_parameter(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    module.register_parameter("scale", nn.Parameter(torch.ones(())))


def new_buffer(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    module.register_buffer("mean", torch.ones(()))


def buffer_replaced(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    module.get_submodule("1").running_mean = torch.ones(3)


def another_optimizer(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (step, True),
        (forget, False),
        (remember_otherwise, False),
        (new_data, False),
        (new_parameter, False),
        (new_buffer, False),
        (buffer_replaced, False),
        (another_optimizer, False),
    ],
)
def test_changes_are_noticed(change: Change, same: bool) -> None:
    """New or replaced tensors of the model or the optimizer are detected; a normal step is not a change."""
    module, optimizer = trained()
    binding = Binding(module, [optimizer], CPU)
    given = {name: tensor.clone() for name, tensor in binding.named_tensors().items()}
    binding.bind_tensors(given)
    change(module, optimizer)
    assert binding.still_holds(given, module, [optimizer]) is same
