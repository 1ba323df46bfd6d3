"""A run that records the number of threads of its layers."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipes import PipelineStrategy
from tests.trainers import make_trainer


class LitThreads(pl.LightningModule):
    """Records the number of threads with which its layers run."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.noted: set[int] = set()
        for layer in self.model:
            layer.register_forward_hook(lambda *_: self.noted.add(torch.get_num_threads()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def noted(devices: int) -> set[int]:
    """Return the numbers of threads with which this rank's layers ran."""
    module = LitThreads()
    trainer = make_trainer(devices=devices, strategy=PipelineStrategy(partition="parameters"), max_steps=1)
    trainer.fit(module, DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=4))
    return module.noted
