"""Rows about bugs that random modules have found, see tests/fuzz."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from tests.compat.registry import row
from tests.trainer.lit import LitOutside, LitUnfrozen


class NotAllOptimized(LitOutside):
    """A module that clips gradients by the norm of all parameters, although its optimizer has only some of them.

    The gradients of the other parameters are never cleared, so they accumulate from batch to batch.
    """

    def on_after_backward(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)


class Running(LitOutside):
    """A module in which two layers add a running mean of their inputs to these inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.model[1], self.model[5] = RunningMean(), RunningMean()


class RunningMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.5).add_(0.5 * x.detach().mean())
        return x + self.mean


RECOMPUTES = {"recompute": True, "microbatches": 1}
found = partial(row, "Found by random modules")
found("code around the layers frozen at first", module=partial(LitUnfrozen, optimizer="sgd"))
found("parameters without an optimizer, in a norm", module=NotAllOptimized)
found("parameters without an optimizer, accumulated", {"accumulate_grad_batches": 2}, module=NotAllOptimized)
found("recompute=True, layers that read buffers that they change", module=Running, strategy=RECOMPUTES)
