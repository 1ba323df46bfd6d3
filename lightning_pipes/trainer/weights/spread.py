"""The marks of a module whose weights stay distributed over ranks after a run."""

from __future__ import annotations

import torch
from torch import nn

INCOMPLETE_ATTRIBUTE = "_lightning_pipes_incomplete"
"""Attribute of a module whose last run failed. The layers of other ranks have no values in such a module."""

SPREAD_ATTRIBUTE = "_lightning_pipes_spread"
"""Attribute of a module that was created on `meta` and has been run: a tuple of the path of its container and the
numbers of the layers that have values in this process.
"""


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on `meta` with the shape, type and class (tensor or parameter) of another tensor."""
    meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta
