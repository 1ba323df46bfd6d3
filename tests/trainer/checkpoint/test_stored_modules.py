"""Tests of modules among the hyperparameters of a module whose layers are distributed over ranks."""

from __future__ import annotations

import io
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_pipes.trainer.checkpoint.saving import snapshot_state
from lightning_pipes.trainer.checkpoint.stored_modules import complete_modules
from lightning_pipes.trainer.cuts.layers.capture import Interceptor
from lightning_pipes.trainer.cuts.layers.pipelined import ContainerCut
from lightning_pipes.trainer.cuts.units.cut import UnitCut, weights_of_stages
from lightning_pipes.trainer.cuts.units.layout import UnitLayout
from tests.cases import for_each


class Net(nn.Module):
    """A network with batch statistics, a buffer that is not saved, and a head that shares the weight of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.LSTM(3, 3), nn.Linear(3, 3))
        self.head = nn.Linear(3, 3)
        self.head.weight = self.layers[0].weight
        self.register_buffer("scale", torch.full((2,), 5.0), persistent=False)


class LitOfNet(pl.LightningModule):
    """A module as in common templates, with the network and the optimizer as arguments."""

    def __init__(self, net: nn.Module, optimizer: Any, criterion: nn.Module) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = net


def cut_layers(module: pl.LightningModule) -> ContainerCut:
    return ContainerCut(module, "net.layers", [3], Interceptor("self.net.layers"))


def cut_units(module: pl.LightningModule) -> UnitCut:
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    stages = {name: (0,) if "layers.3" in name else (1,) for name in names if "scale" not in name}
    layout = UnitLayout((0, 1), ("a", "b"), (), frozenset(), stages, clones=True)
    return UnitCut(module, layout, weights_of_stages(module, layout), [0], torch.device("cpu"))


def load_written(checkpoint: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(checkpoint, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=False)
    return loaded


@for_each("cut", [cut_layers, cut_units])
@for_each("background", [False, True])
def test_a_module_among_the_hyperparameters_is_stored_whole(cut, background):
    module = LitOfNet(Net(), partial(torch.optim.SGD, lr=0.1), nn.CrossEntropyLoss(torch.ones(3)))
    state = {key: value.clone() for key, value in module.state_dict().items()}
    cut_module = cut(module)
    checkpoint = {"state_dict": state, "hyper_parameters": dict(module.hparams), "epoch": 3}
    whole = complete_modules(checkpoint, cut_module)
    loaded = load_written(snapshot_state(whole) if background else whole)
    net = loaded["hyper_parameters"]["net"]
    assert loaded["epoch"] == 3
    assert {f"net.{key}": value.tolist() for key, value in net.state_dict().items()} == {
        key: value.tolist() for key, value in state.items() if key.startswith("net.")
    }
    assert net.head.weight is net.layers[0].weight
    assert net.scale.tolist() == [5.0, 5.0]
    assert type(net.layers) is nn.Sequential
    bias = loaded["state_dict"]["net.head.bias"]
    assert background or net.head.bias.data_ptr() == bias.data_ptr()  # the bias is written once
    again = LitOfNet(**loaded["hyper_parameters"])
    again.load_state_dict(loaded["state_dict"])
    assert isinstance(again.hparams["criterion"], nn.CrossEntropyLoss)


def test_without_values_a_stored_module_takes_those_of_the_state_dict():
    module = LitOfNet(Net(), None, nn.MSELoss())
    state = {key: value.clone() for key, value in module.state_dict().items()}
    checkpoint = {"state_dict": {}, "hyper_parameters": dict(module.hparams)}
    stored = load_written(snapshot_state(complete_modules(checkpoint, cut_layers(module), share=False)))
    net = stored["hyper_parameters"]["net"]
    assert not any(p.any() for p in net.parameters())
    assert net.head.weight is net.layers[0].weight
    LitOfNet(net, None, nn.MSELoss()).load_state_dict(state)
    assert torch.equal(net.layers[0].weight, state["net.layers.0.weight"])


def test_a_checkpoint_without_modules_stays_as_it_is():
    module = LitOfNet(Net(), None, nn.MSELoss())
    checkpoint = {"state_dict": {}, "hyper_parameters": {"width": 3, "criterion": nn.MSELoss(), "made_by": lambda: 1}}
    assert complete_modules(checkpoint, cut_layers(module)) is checkpoint
