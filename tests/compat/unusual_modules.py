"""Modules that are written in less usual ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from tests.trainer.lit import Lit


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
