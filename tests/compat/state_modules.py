"""LightningModules of the rows about what modules keep besides weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from tests.trainer.lit import WIDTH, Lit


def modes(trainer: pl.Trainer, folder: Path) -> dict[str, bool]:
    """Whether each module that is on this rank trains."""
    module = trainer.lightning_module
    return {name: part.training for name, part in module.named_modules() if "metric" not in name}


class FrozenNorms(Lit):
    """Batch normalisation with fixed statistics, no dropout, and layers that train around them."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        for at in (1, 5):
            self.model[at] = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
            self.model[at].running_mean.fill_(0.3)
            self.model[at].eval()
        for at in (0, 2, 4, 6):
            self.model[at].eval()


class PartlyFrozen(Lit):
    """The dropout in each layer is off; what follows the layers is in eval mode, too."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        for at in (0, 2, 4, 6):
            self.model[at][1].eval()
        self.after = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 3)).eval()

    def forward(self, x: Any) -> Any:
        return self.after(self.model(x))
