"""A short run for tests of its report."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from tests.trainer.lit import data, quiet
from tests.trainers import make_trainer


def fit(module: pl.LightningModule, strategy: PipelineStrategy, ranks: int, **options: Any) -> pl.Trainer:
    """Train for two epochs without writing files, and return the Trainer."""
    quiet()
    trainer = make_trainer(
        devices=ranks, strategy=strategy, precision="64-true", **{"logger": False, "max_epochs": 2, **options}
    )
    trainer.fit(module, DataLoader(data(), batch_size=8))
    return trainer
