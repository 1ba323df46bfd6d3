"""A script for test_doors.py: a fit, or a study whose trials share a pipeline, with Lightning's launcher and defaults.

Its arguments are the kind of run, "fit" or "study", and a folder. The run ends when the file `planted` appears in the
folder.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import optuna
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipes import PipelineStrategy, optimize_array

WHAT, FOLDER = sys.argv[1], Path(sys.argv[2])
BATCHES = 1 << 20


class Net(pl.LightningModule):
    """A module whose training ends when the file `planted` exists."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.layers(batch[0]).mean()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        (FOLDER / f"trains{self.trainer.global_rank}").touch()
        time.sleep(0.01)
        if self.trainer.strategy.broadcast((FOLDER / "planted").exists()):
            self.trainer.should_stop = True

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit() -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=PipelineStrategy("jap" if WHAT == "study" else "1f1b", partition="parameters"),
        max_steps=BATCHES,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(TensorDataset(torch.ones(400, 2)), 4))


def objective(trial: Any) -> float:
    trial.suggest_float("x", 0.0, 1.0)
    fit()
    return 1.0


if WHAT == "study":
    optimize_array(optuna.create_study(), objective, 4, 2)
else:
    fit()
print("came to its end", flush=True)
