"""A module with buffers for the tests of buffer changes."""

from __future__ import annotations

import torch
from torch import nn


def layer(size: int = 1) -> nn.Module:
    """Return a module with the buffers `kept` and `mean`, each with `size` zeros."""
    module = nn.Module()
    module.register_buffer("kept", torch.zeros(size))
    module.register_buffer("mean", torch.zeros(size))
    return module
