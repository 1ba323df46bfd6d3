"""A small supernet, and batches that train its subnets."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from lightning_pipes.supernets import ChoiceBlock, Supernet

BATCHES, ROWS, WIDTH, BLOCKS = 6, 16, 4, 4


def choices(number: int) -> tuple[int, ...]:
    return tuple(torch.randint(3, (BLOCKS,), generator=torch.Generator().manual_seed(number)).tolist())


class Lit(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        blocks = (
            ChoiceBlock([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]) for _ in range(BLOCKS)
        )
        self.net = Supernet(*blocks)

    def layers_of_batch(self, batch: Any) -> Any:
        return self.net.layers_of(choices(batch[2]))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y, number = batch
        return F.mse_loss(self.net((x, choices(number))), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Batches(Dataset[Any]):
    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        g = torch.Generator().manual_seed(100 + number)
        return torch.randn(ROWS, WIDTH, generator=g), torch.randn(ROWS, WIDTH, generator=g), number


def new_module(kind: type[Lit] = Lit) -> Lit:
    torch.manual_seed(0)
    return kind()
