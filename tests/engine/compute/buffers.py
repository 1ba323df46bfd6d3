"""A layer with buffers."""

from __future__ import annotations

import torch
from torch import nn


def layer(size: int = 1) -> nn.Module:
    module = nn.Module()
    module.register_buffer("kept", torch.zeros(size))
    module.register_buffer("mean", torch.zeros(size))
    return module
