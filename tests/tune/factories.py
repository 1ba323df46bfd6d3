"""Models for tests of `lightning-pipes profile model=tests.tune.factories:...`."""

from __future__ import annotations

import lightning as L
import torch
from torch import nn


class Lit(L.LightningModule):
    """A module with a layer before its container of layers, and an example of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(3, 8)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        self.example_input_array = torch.randn(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.inlet(x))

    def configure_optimizers(self) -> object:
        return {"optimizer": torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)}


def sequential() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(1, 4)


def nothing() -> str:
    return "a string"


def no_example() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4))
