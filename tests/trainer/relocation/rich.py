"""A module whose layers have every kind of state."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.trainer.lit import WIDTH, LitOutside

LAYERS = 6


class Block(nn.Module):
    """A layer with trained and frozen weights, running averages, a buffer that may not be saved, and extra state."""

    def __init__(self, saved: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)  # the norm would remove a bias, whose gradient would be noise
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("count", torch.zeros(1), persistent=saved)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
            self.calls += 1
        return self.norm(self.linear(x)) * self.scale + 0.01 * self.count + 0.001 * self.calls

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class LitRich(LitOutside):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model = nn.Sequential(*(Block() for _ in range(LAYERS - 1)), nn.Linear(WIDTH, 3))
