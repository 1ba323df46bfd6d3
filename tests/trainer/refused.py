"""Modules whose layers cannot run in a pipeline."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.trainer.lit import Lit


class Twice(Lit):
    """A module that calls its layers twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x) + self.model(-x)


class BareExcept(Lit):
    """A module that calls its layers within a bare `except:`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.model(x)
        except:  # noqa: E722
            return x


class Penalty(Lit):
    """A module whose loss contains the weights of all layers."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch) + sum(p.square().sum() for p in self.parameters())


class OwnForward(Lit):
    """A module whose `nn.Sequential` has its own `forward`."""

    def __init__(self) -> None:
        super().__init__()

        class Special(nn.Sequential):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) * 2

        self.model = Special(*self.model)
