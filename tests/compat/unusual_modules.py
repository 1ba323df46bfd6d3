"""Modules that are written in less usual ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.trainer.lit import WIDTH, Lit

Transform = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class LitLoss(Lit):
    """Logs the loss alone, and trains by it."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss


class Features(LitLoss):
    """Penalizes what `features(layers, x)` computes in a step, next to the call of all layers."""

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
    """Calls the layers in two slices, one after the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model[4:](self.model[:4](x))
        return logits


class Transforms(LitLoss):
    """Two layers, or the code after the layers, call transforms of torch.func.

    Args:
        transform: takes a module and its input.
        where: "layers" for two layers that call it on a linear one, "step" for the step with a linear one after the
            layers, "all" for the step with all layers.
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
    """A layer that calls a transform of torch.func on a linear one."""

    def __init__(self, transform: Transform) -> None:
        super().__init__()
        self.linear, self.transform = nn.Linear(WIDTH, WIDTH), transform

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.transform(self.linear, x)


def gradient(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.func.grad(lambda z: layer(z).tanh().pow(2).sum())(x)
    return found


def pulled_back(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out, pull_back = torch.func.vjp(lambda z: layer(z).tanh(), x)
    found: torch.Tensor = pull_back(torch.ones_like(out))[0]
    return found


def tangent(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.func.jvp(lambda z: layer(z).tanh(), (x,), (torch.ones_like(x),))[1]
    return found


def mapped(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.vmap(torch.func.grad(lambda z: layer(z).tanh().pow(2).sum()))(x)
    return found


class ComplexLayer(nn.Module):
    """A layer with complex weights, as of a Fourier operator; it returns real numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(self.weight.dtype) @ self.weight).abs()


class ComplexWeights(LitLoss):
    """Has a layer with complex weights on each of two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.model[2], self.model[6] = ComplexLayer(), ComplexLayer()


class ComplexClippedInHook(ComplexWeights):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", nn.utils.clip_grad_norm_(self.parameters(), 0.05))
