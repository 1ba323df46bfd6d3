"""Modules that are written in less usual ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, Dataset

from tests.trainer.lit import WIDTH, Lit, data

Transform = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class LitLoss(Lit):
    """A module that logs and returns only its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss


class Features(LitLoss):
    """A module that penalizes the result of `features(layers, x)` in addition to its usual loss."""

    def __init__(self, features: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.__dict__["features"] = features

    def loss(self, batch: Any) -> torch.Tensor:
        found: torch.Tensor = self.__dict__["features"](self.model, batch[0])
        return F.cross_entropy(self(batch[0]), batch[1]) + found.pow(2).mean()


def by_slice(layers: Any, x: torch.Tensor) -> torch.Tensor:
    features: torch.Tensor = layers[:3](x)
    return features


def by_children(layers: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in list(layers.children())[:3]:
        x = layer(x)
    return x


def by_name(layers: Any, x: torch.Tensor) -> torch.Tensor:
    features: torch.Tensor = layers.get_submodule("0")(x)
    return features


class TwoSlices(LitLoss):
    """A module that calls its layers in two slices, one after the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model[4:](self.model[:4](x))
        return logits


class Transforms(LitLoss):
    """A module in which two layers, or the code after the layers, call transforms of torch.func.

    Args:
        transform: takes a module and its input.
        where: the module that is transformed: "layers" for linear modules inside two layers, "step" for a linear module
            after the layers, "all" for the container of all layers.
    """

    def __init__(self, transform: Transform, where: str) -> None:
        super().__init__()
        self.__dict__["transform"], self.__dict__["where"] = transform, where
        self.model[-1] = nn.Linear(WIDTH, WIDTH)
        if where == "layers":
            self.model[3], self.model[5] = Transformed(transform), Transformed(transform)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        transform, where = self.__dict__["transform"], self.__dict__["where"]
        if where == "all":
            x = transform(self.model, x)
        else:
            x = self.model(x)
        return (transform(self.head, x) if where == "step" else x)[:, :3]


class Transformed(nn.Module):
    """A layer that calls a transform of torch.func on a linear module."""

    def __init__(self, transform: Transform) -> None:
        super().__init__()
        self.linear, self.transform = nn.Linear(WIDTH, WIDTH), transform

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.transform(self.linear, x)


def gradient(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.func.grad(lambda z: layer(z).tanh().pow(2).sum())(x)
    return found


def pulled_back(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    made: Any = torch.func.vjp(lambda z: layer(z).tanh(), x)
    found: torch.Tensor = made[1](torch.ones_like(made[0]))[0]
    return found


def tangent(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.func.jvp(lambda z: layer(z).tanh(), (x,), (torch.ones_like(x),))[1]
    return found


def mapped(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.vmap(torch.func.grad(lambda z: layer(z).tanh().pow(2).sum()))(x)
    return found


class ComplexLayer(nn.Module):
    """A layer with complex weights that returns real numbers, as in Fourier operators."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(self.weight.dtype) @ self.weight).abs()


class ComplexWeights(LitLoss):
    """A module with one layer with complex weights on each of two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.model[2], self.model[6] = ComplexLayer(), ComplexLayer()


class ComplexClippedInHook(ComplexWeights):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", nn.utils.clip_grad_norm_(self.parameters(), 0.05))


def loaders_of_eights() -> dict[str, Any]:
    return {"train_dataloaders": DataLoader(data(24), batch_size=8), "val_dataloaders": DataLoader(data(8), 8)}


class Recurrent(LitLoss):
    """A module that passes the states of recurrent cells from batch to batch, in a list of tuples.

    This is truncated backpropagation through time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(WIDTH, WIDTH) for _ in range(3))
        self.states: list[Any] = [None] * 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = []
        for cell, state in zip(self.cells, self.states if self.training else [None] * 3, strict=True):
            x, c = cell(x, state)
            states.append((x.detach(), c.detach()))
        if self.training:
            self.states = states
        logits: torch.Tensor = self.model(x)
        return logits


class Sequences(Dataset[Any]):
    """Sequences of one to five steps, padded to five."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int, int]:
        generator = torch.Generator().manual_seed(number)
        return torch.randn(5, WIDTH, generator=generator).double(), 1 + number % 5, number % 3


def loaders_of_sequences() -> dict[str, Any]:
    return {"train_dataloaders": DataLoader(Sequences(), 8), "val_dataloaders": DataLoader(Sequences(), 8)}


class Packing(LitLoss):
    """A module that packs padded sequences in its step, before the layers, or in its first layer."""

    def __init__(self, in_layers: bool) -> None:
        super().__init__()
        self.in_layers = in_layers
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        if in_layers:
            recurrent = [PackedGRU() for _ in range(4)]
            self.model = nn.Sequential(Packs(), *recurrent, Unpacks(), nn.Linear(WIDTH, 3))

    def loss(self, batch: Any) -> torch.Tensor:
        x, lengths, y = batch
        if self.in_layers:
            return F.cross_entropy(self.model((x, lengths)), y)
        return F.cross_entropy(self.model(self.gru(packed(x, lengths))[1][0]), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        pass


def packed(x: torch.Tensor, lengths: torch.Tensor) -> PackedSequence:
    return pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)


class Packs(nn.Module):
    def forward(self, batch: tuple[torch.Tensor, torch.Tensor]) -> PackedSequence:
        return packed(*batch)


class PackedGRU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH)

    def forward(self, x: PackedSequence) -> PackedSequence:
        found: PackedSequence = self.gru(x)[0]
        return found


class Unpacks(nn.Module):
    def forward(self, x: PackedSequence) -> torch.Tensor:
        return pad_packed_sequence(x, batch_first=True, total_length=5)[0].mean(1)


def loaders_of_index_lists() -> dict[str, Any]:
    """Return loaders whose batch sampler is a list of lists, which has no batch_size."""
    numbers: Any = [list(range(start, min(start + 8, 22))) for start in (0, 8, 16)]
    return {"train_dataloaders": DataLoader(data(), batch_sampler=numbers), "val_dataloaders": DataLoader(data(13), 5)}


class ReadsLoader(LitLoss):
    """A module that scales its loss by the batch size and the length of the Trainer's loader."""

    def loss(self, batch: Any) -> torch.Tensor:
        loader: Any = self.trainer.train_dataloader
        scale = loader.batch_size / len(loader) if self.training else 1
        return super().loss(batch) * scale


class BackwardHooks(LitLoss):
    """A module with full backward hooks on layers that have no submodules.

    Args:
        later: whether the hooks are registered when training starts, not when the module is created.
    """

    def __init__(self, later: bool) -> None:
        super().__init__()
        self.later = later
        if not later:
            self.register()

    def register(self) -> None:
        layers: Any = self.model
        for layer in layers[1::2]:
            layer.register_full_backward_hook(lambda module, before, after: (before[0] * 0.5,))

    def on_train_start(self) -> None:
        if self.later:
            self.register()


class TwoNames(LitLoss):
    """A module with two attributes that refer to one sparse tensor. Its step replaces one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.one = self.other = torch.eye(WIDTH, dtype=torch.float64).to_sparse()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (self.other @ x.T).T
        if self.training:
            self.one = (self.one * 1.5).coalesce()
        logits: torch.Tensor = self.model((self.one @ x.T).T)
        return logits
