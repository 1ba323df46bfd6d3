"""A layer is copied to another rank and back with its complete state, and nothing else changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipes.engine.residency.mirrors import Mirrors
from lightning_pipes.ir import PlanError


class Told(nn.Module):
    """A layer with buffers, an extra state, and a tensor in another memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.word = "first"

    def get_extra_state(self) -> str:
        return self.word

    def set_extra_state(self, state: str) -> None:
        self.word = state


class Desk:
    """A transport that stores only the last message."""

    def send(self, rank: int, key: Any, content: Any) -> None:
        self.content = copy.deepcopy(content)

    def receive(self, rank: int, key: Any, on_arrival: Any) -> Any:
        raise NotImplementedError


def side(home: bool) -> tuple[nn.ModuleList, torch.optim.Optimizer, Mirrors, Desk]:
    """Return layers, optimizer, mirrors and transport of the rank that owns layer 1 (`home`), or of the other rank."""
    torch.manual_seed(0)
    layers, desk = nn.ModuleList([nn.Linear(2, 2), nn.ModuleList([Told(), nn.ReLU()])]), Desk()
    own = layers[1 if home else 0]
    optimizer = torch.optim.Adam(
        [
            {"params": [p for p in own.parameters() if p.ndim > 1]},
            {"params": [p for p in own.parameters() if p.ndim < 2]},
        ]
    )
    mirrors = Mirrors(
        dict(enumerate(layers)),
        lambda number: (number == 1) == home,
        desk,
        lambda: [optimizer],
        lambda o, layer, name: int(dict(layers[layer].named_parameters())[name].ndim < 2),
    )
    return layers, optimizer, mirrors, desk


def test_there_and_back() -> None:
    """A layer that is trained on another rank three times is equal to a layer that stays on its rank."""
    layers, optimizer, mirrors, desk = side(home=True)
    theirs, other, away, back = side(home=False)
    alone, alone_optimizer, _, _ = side(home=True)
    told: Any = layers[1].get_submodule("0")
    told.word, told.norm.training, told.conv.bias.requires_grad = "second", False, False
    alone.load_state_dict(layers.state_dict())
    alone[1].get_submodule("0.conv").bias.requires_grad_(False)
    groups = [len(group["params"]) for group in other.param_groups]
    for turn in range(3):
        mirrors.send("1.0", 1, "there")
        away.install_layer("1.0", desk.content)
        mirror = away.copies["1.0"]
        assert mirror.parameters["conv.weight"].stride() == told.conv.weight.stride() != (27, 9, 3, 1)
        assert not mirror.parameters["conv.bias"].requires_grad
        copied: Any = theirs[1].get_submodule("0")
        assert (copied.word, copied.norm.training, copied.training) == ("second", False, True)
        gradients = [torch.full_like(p, turn + 1.0) for p in mirror.parameters.values()]
        for p, q, gradient in zip(mirror.parameters.values(), alone[1].parameters(), gradients, strict=True):
            if p.requires_grad:
                p.grad, q.grad = gradient, gradient.clone()
        with away.in_optimizers(["0", "1.0"]):
            other.step()
            other.zero_grad()
        alone_optimizer.step()
        assert [len(group["params"]) for group in other.param_groups] == groups
        assert not other.state
        mirror.buffers["scratch"] += 1
        mirror.buffers["norm.running_mean"] += 2
        away.send("1.0", 0, "back")
        mirrors.install_layer("1.0", back.content)
    for (name, p), q in zip(layers[1].named_parameters(), alone[1].parameters(), strict=True):
        assert torch.equal(p, q), name
    assert told.scratch.tolist() == [4, 4]
    assert told.norm.running_mean.tolist() == [6] * 4
    assert {id(p) for p in optimizer.state} == {id(p) for p in layers[1].parameters() if p.requires_grad}
    assert all(int(state["step"]) == 3 for state in optimizer.state.values())
    away.drop_copy("1.0")
    assert not away.copies


def test_code_that_would_not_see_gradients_is_refused() -> None:
    """A layer with a gradient hook is refused, because the hook would not run on the other rank."""
    layers, _, mirrors, _ = side(home=True)
    handle = layers[1].get_submodule("0.conv").bias.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(PlanError, match=r"layer '1.0' goes to another rank .* conv.bias in it has a hook"):
        mirrors.send("1.0", 1, "there")
    handle.remove()
    mirrors.send("1.0", 1, "there")


def test_a_change_at_home_while_a_layer_is_away_is_refused() -> None:
    """Changing a layer on its own rank while another rank has the current copy raises an error."""
    layers, _, mirrors, desk = side(home=True)
    mirrors.send("1.0", 1, "there")
    mirrors.install_layer("1.0", desk.content)
    mirrors.send("1.0", 1, "there")
    layers[1].get_submodule("0.conv").weight.data.clamp_(-0.01, 0.01)
    with pytest.raises(PlanError, match=r"changes the values of layer '1.0' where the layer is at home"):
        mirrors.install_layer("1.0", desk.content)


def test_in_module_shows_copies_in_place_of_a_layers_own() -> None:
    """`in_module` temporarily replaces the parameters of a layer by the parameters of its copy."""
    _, _, mirrors, desk = side(home=True)
    theirs, _, away, _ = side(home=False)
    mirrors.send("1.0", 1, "there")
    away.install_layer("1.0", desk.content)
    own = dict(theirs.named_parameters())
    with away.in_module(["0", "1.0"]):
        shown = dict(theirs.named_parameters())
    assert dict(theirs.named_parameters()) == own
    copied = {f"1.0.{at}": p for at, p in away.copies["1.0"].parameters.items()}
    assert {name: p for name, p in shown.items() if p is not own[name]} == copied
