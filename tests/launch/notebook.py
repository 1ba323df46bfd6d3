"""Definitions for the cells of test_notebook.py: trainings in one process, a failure, and an interrupt."""

import os
import signal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipes import PipelineStrategy

torch.ones(300, 300) @ torch.ones(300, 300)  # starts threads, which forked processes do not have


class Net(pl.LightningModule):
    def __init__(self, harm=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 4))
        self.losses, self.harm = [], harm

    def training_step(self, batch, batch_idx):
        loss = self.layers(batch[0]).square().mean()
        self.losses.append(float(loss.detach()))
        self.log("loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch, batch_idx):
        self.log("tested", self.layers(batch[0]).square().mean())

    def predict_step(self, batch, batch_idx):
        return self.layers(batch[0])

    def on_train_batch_end(self, *_):
        if self.harm is not None and self.trainer.global_step == 2:
            self.harm(self.trainer)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Counts(Callback):
    """A callback that records the epochs."""

    def __init__(self):
        self.epochs = []

    def on_train_epoch_end(self, trainer, module):
        self.epochs.append(trainer.current_epoch)


def make_trainer(devices, **options):
    return pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=PipelineStrategy(microbatches=2, partition="parameters", check_loss=False),
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"logger": False, "enable_checkpointing": False, "max_epochs": 2, **options},
    )


def loader():
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(12, 4, generator=generator)), batch_size=4)


def raise_error(trainer):
    if trainer.global_rank == 1:
        raise ZeroDivisionError("of a hook")


def interrupt(trainer):
    """Send SIGINT to the parent process of rank 0, and wait for a signal."""
    if trainer.global_rank == 0:
        os.kill(os.getppid(), signal.SIGINT)
        signal.pause()


def describe(trainer, net):
    """Return the state of a module and its trainer after a run, as plain data."""
    found = {
        "weights": [p.tolist() for p in net.parameters()],
        "losses": [*net.losses],
        "metrics": [
            {k: float(v) for k, v in each.items()}
            for each in (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)
        ],
        "counts": (trainer.current_epoch, trainer.global_step, trainer.state.status.value),
    }
    for callback in trainer.callbacks:
        if isinstance(callback, Counts):
            found["epochs"] = [*callback.epochs]
        if isinstance(callback, ModelCheckpoint):
            found["best"] = (os.path.basename(callback.best_model_path), os.path.exists(callback.best_model_path))
    return found
