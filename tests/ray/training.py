"""Functions that processes of Ray run."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import optuna
import ray.train
import torch
from optuna.trial import BaseTrial
from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipes import OptunaPruning
from lightning_pipes.ray import RayPipelineStrategy, prepare_trainer
from tests.trainers import make_trainer


class Net(pl.LightningModule):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)], nn.Linear(6, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def fit(lr: float = 0.01, ckpt_path: str | None = None, **options: Any) -> pl.Trainer:
    """Train, and return the Trainer. Without a strategy, this is training in one process."""
    warnings.filterwarnings("ignore")
    pl.seed_everything(3, verbose=False)
    x = torch.randn(40, 6)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    trainer = make_trainer(**{"devices": "auto" if "strategy" in options else 1, "max_epochs": 2, **options})
    if "strategy" in options:
        assert prepare_trainer(trainer) is trainer
    trainer.fit(Net(lr), DataLoader(data, 10, shuffle=True), DataLoader(data, 20), ckpt_path=ckpt_path)
    return trainer


def weights(trainer: pl.Trainer) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in trainer.lightning_module.state_dict().items()}


def train_loop(config: dict[str, Any]) -> dict[str, Any]:
    """Train in a worker of Ray Train with both formats of checkpoints, and continue from the last one.

    Returns:
        The weights of the three runs.
    """
    full = fit(strategy=RayPipelineStrategy(microbatches=1), callbacks=[RayTrainReportCallback()])
    sharded = fit(
        strategy=RayPipelineStrategy("gpipe", microbatches=1, checkpoint="sharded"),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
    )
    with ray.train.get_checkpoint().as_directory() as folder:
        resumed = fit(strategy=RayPipelineStrategy(microbatches=1), ckpt_path=f"{folder}/checkpoint.ckpt", max_epochs=3)
    return {"full": weights(full), "sharded": weights(sharded), "resumed": weights(resumed)}


KILLS = {1: "0", 4: "1"}
"""The rank that kills its process in the middle of a trial, by the number of the trial."""


class Kill(pl.Callback):
    """Kill this process in the second epoch."""

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def open_study(folder: Path) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(
        storage=f"sqlite:///{folder}/study.db",
        study_name="s",
        load_if_exists=True,
        sampler=optuna.samplers.RandomSampler(seed=1),
        pruner=optuna.pruners.NopPruner(),  # otherwise, the order in which trials end determines which are pruned
    )


def deadly(trial: BaseTrial) -> float:
    """Return the loss of a trial. Two trials kill a rank, and their repetitions, which have other numbers, do not."""
    lr = trial.suggest_float("lr", 1e-3, 1e-1, log=True)
    is_killed = KILLS.get(trial.number) == os.environ["RANK"]
    trainer = fit(
        lr,
        strategy=RayPipelineStrategy("jap", microbatches=1),
        callbacks=[OptunaPruning(), *([Kill()] if is_killed else [])],
    )
    return float(trainer.callback_metrics["val_loss"])


def faulty(trial: BaseTrial) -> float:
    if trial.number == 2:
        raise KeyError("harm")
    return trial.suggest_float("x", 0.0, 1.0)


def lethal(trial: BaseTrial) -> float:
    """Kill the process in every trial."""
    trial.suggest_float("x", 0.0, 1.0)
    os.kill(os.getpid(), signal.SIGKILL)
    return 0.0
