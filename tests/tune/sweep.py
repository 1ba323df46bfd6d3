"""A small study, as functions for ranks and as a script."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import optuna
import torch
from optuna.trial import BaseTrial
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipes import OptunaPruning, PipelineStrategy, optimize_array
from lightning_pipes.testing.ranks import scale_timeout
from tests.trainers import make_trainer


class Net(pl.LightningModule):
    def __init__(self, lr: float, width: int = 6) -> None:
        super().__init__()
        self.lr = lr
        blocks = [nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1), nn.Tanh()) for _ in range(3)]
        self.layers = nn.Sequential(*blocks, nn.Linear(width, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def fit(
    lr: float,
    batch: int = 10,
    epochs: int = 3,
    width: int = 6,
    devices: int | None = None,
    callbacks: Sequence[pl.Callback] = (),
    checkpoint: str | None = None,
) -> float:
    """Train, from a checkpoint if one is given, and return the validation loss."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    pl.seed_everything(3, verbose=False)
    x = torch.randn(40, width)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    trainer = make_trainer(
        devices=devices or int(os.environ.get("WORLD_SIZE", "1")),
        strategy=PipelineStrategy("1f1b", microbatches=2),
        max_epochs=epochs,
        callbacks=[OptunaPruning(), *callbacks],
    )
    loaders = DataLoader(data, batch, shuffle=True), DataLoader(data, 20)
    trainer.fit(Net(lr, width), *loaders, ckpt_path=checkpoint)
    return float(trainer.callback_metrics["val_loss"])


def objective(trial: BaseTrial, devices: int | None = None) -> float:
    """Return the loss for a random learning rate and batch size.

    Learning rates above 0.3 raise a ValueError.
    """
    lr = trial.suggest_float("lr", 1e-4, 1.0, log=True)
    batch = trial.suggest_categorical("batch", [5, 10, 20])
    if lr > 0.3:
        raise ValueError("lr is too large")
    loss = fit(lr, batch, devices=devices)
    trial.set_user_attr("twice", 2 * loss)
    return loss


def summary(study: optuna.Study) -> list[Any]:
    """Return the data of trials that is equal in two runs with one seed."""
    return [(t.number, t.state.name, t.params, t.values, t.intermediate_values) for t in study.trials]


def new_study(**more: Any) -> optuna.Study:
    """Return a study with a seeded sampler and a median pruner."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=1, n_startup_trials=4),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=2),
        **more,
    )


if __name__ == "__main__":
    faulthandler.dump_traceback_later(
        scale_timeout(100), exit=True
    )  # prints where a process hangs, before its caller's timeout
    folder = Path(sys.argv[1])
    made = optimize_array(
        lambda: new_study(storage=f"sqlite:///{folder}/study.db", study_name="script", load_if_exists=True),
        lambda trial: objective(trial, devices=2),
        n_trials=6,
        array_size=3,
        catch=ValueError,
    )
    (folder / f"{os.getpid()}.said").write_text(str(summary(made)))
