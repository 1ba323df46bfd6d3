"""A script that trains without end and reports the progress of each rank in files."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipes import PipelineStrategy

HEARTBEAT_TIMEOUT = 5.0
STOPS = "LIGHTNING_PIPES_TEST_STOPS"
"""The environment variable that specifies a rank and the point at which this rank stops itself.

With "started1", rank 1 stops before it connects to the others. With "training1", it stops while rank 0 waits for it in
a collective call of gloo.
"""


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def stop_at(place: str) -> None:
    """Stop this process if the environment variable names this place."""
    if os.environ.get(STOPS) == place:
        os.kill(os.getpid(), signal.SIGSTOP)


class Says(Callback):
    """A callback that writes the process number to a file after some steps."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            Path(f"training{trainer.global_rank}").write_text(str(os.getpid()))
            stop_at(f"training{trainer.global_rank}")


def main() -> None:
    rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    strategy = PipelineStrategy(microbatches=2, partition="parameters", heartbeat_timeout=HEARTBEAT_TIMEOUT)
    started = Path(f"started{rank}")
    started.with_suffix(".new").write_text(str(os.getpid()))
    started.with_suffix(".new").rename(started)
    stop_at(f"started{rank}")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=int(sys.argv[1]),
        max_epochs=-1,
        callbacks=[Says(), OnExceptionCheckpoint(".", filename="left")],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(TensorDataset(torch.linspace(-1, 1, 64).view(16, 4)), batch_size=4))


if __name__ == "__main__":
    main()
