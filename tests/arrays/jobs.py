"""Siblings with different settings, some of which fail on purpose."""

from __future__ import annotations

import os
import signal
import warnings
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipes import PipelineStrategy
from lightning_pipes.arrays.siblings.sibling_board import SiblingFailure
from lightning_pipes.ir import Schedule
from tests.trainer.one_gpu import SHARED, on_one_gpu
from tests.trainers import make_trainer

LAST = 0
"""The global rank of the last stage."""


class LoRALinear(nn.Module):
    """A linear layer that does not train and is equal in all siblings of its width, with an adapter of low rank."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(width)
        self.base = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.base.weight.data.copy_(torch.randn(width, width, generator=g) / width**0.5)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Net(pl.LightningModule):
    """A module that depends on torch's and NumPy's random numbers, and whose step fails if `harmful` is set."""

    def __init__(self, lr: float, width: int = 6, depth: int = 6, lora: int = 0) -> None:
        super().__init__()
        self.lr = lr
        self.harmful = False

        def make_linear() -> nn.Module:
            return LoRALinear(width, lora) if lora else nn.Linear(width, width)

        blocks = [nn.Sequential(make_linear(), nn.Dropout(0.3), nn.Tanh()) for _ in range(depth)]
        self.layers = nn.Sequential(*blocks, nn.Linear(width, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        noise = torch.rand(()) + np.random.rand()
        out = self.layers(x)
        if self.harmful:  # on the last stage only, because other stages do not run this code
            raise ValueError(f"loss of shape {tuple(out.shape)}")
        loss = nn.functional.mse_loss(out, y) * noise
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.layers(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


@dataclass(frozen=True)
class Job:
    """The settings of one sibling, and the function that trains it."""

    number: int
    folder: str = ""
    epochs: int = 2
    batch: int = 8
    harm: str = ""
    width: int = 6
    depth: int = 6
    lora: int = 0
    clip: float | None = None
    patience: int | None = None
    schedule: str | Schedule = "jap"
    recompute: bool = False
    microbatches: int | None = 2
    partition: tuple[int, ...] | tuple[str, ...] = ()
    gpu: bool = False

    def __call__(self) -> Any:
        warnings.filterwarnings("ignore")
        pl.seed_everything(self.number, verbose=False)
        g = torch.Generator().manual_seed(7)
        x = torch.randn(40, self.width, generator=g)
        held_out = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 16)
        batch, shuffle = self.batch, self.harm not in UNEQUAL
        if not shuffle and int(os.environ.get("RANK", "0")) == LAST:
            x = x[:24] if self.harm == "fewer batches" else x + (self.harm == "other samples")
            batch += 3 * (self.harm == "other rows")
        loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch, shuffle=shuffle)
        module = Net(0.01 * (1 + self.number), self.width, self.depth, self.lora)
        seen = Seen(self.harm)
        callbacks: list[Callback] = [seen]
        if self.folder:
            folder = f"{self.folder}/{self.number}"
            callbacks.append(ModelCheckpoint(folder, "best", "val_loss", enable_version_counter=False))
        if self.patience is not None:
            callbacks.append(EarlyStopping("val_loss", patience=self.patience, min_delta=1e9))
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        trainer = make_trainer(
            **(on_one_gpu(ranks) if self.gpu else {"devices": ranks}),
            strategy=PipelineStrategy(
                self.schedule,
                microbatches=self.microbatches,
                seed=self.number,
                data="each" if self.harm else "auto",
                recompute=self.recompute,
                partition=list(self.partition) or "auto",
                **(SHARED if self.gpu else {}),
            ),
            max_epochs=self.epochs,
            callbacks=callbacks,
            gradient_clip_val=self.clip,
        )
        trainer.fit(module, loader, held_out)
        if self.harm == "after fit" and trainer.global_rank == LAST:
            raise ValueError("after fit")
        weights = {name: p.detach().cpu().clone() for name, p in module.named_parameters()}
        return seen.losses, float(trainer.callback_metrics["val_loss"]), trainer.global_step, weights


class Seen(Callback):
    """A callback that records losses, and fails in the third batch in the way that `harm` specifies."""

    def __init__(self, harm: str) -> None:
        self.losses: list[float] = []
        self.harm = harm
        self.exceptions: list[BaseException] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if len(self.losses) == 2:
            if self.harm == "everywhere" or (self.harm == "one rank" and trainer.global_rank == LAST):
                raise ValueError(self.harm)
            if self.harm == "loss":
                module.harmful = True
            if self.harm == "rank dies" and trainer.global_rank == LAST:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.harm == "Ctrl-C" and trainer.global_rank == LAST:
                signal.raise_signal(signal.SIGINT)

    def on_before_zero_grad(self, trainer: pl.Trainer, *args: Any) -> None:
        if self.harm == "before its step" and trainer.global_rank == LAST:
            raise ValueError(self.harm)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        if len(self.losses) == 3 and self.harm == "hook on one rank" and trainer.global_rank == LAST:
            raise ValueError(self.harm)

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        EXCEPTIONS.append(type(exception).__name__)


EXCEPTIONS: list[str] = []
"""Names of the exceptions with which siblings of this process ended."""


def told_text(error: BaseException | None) -> str:
    """Return the text of an error, with its cause if another rank caused it."""
    cause = error and error.__cause__
    told = f" <- {type(cause).__name__}: {cause}" if isinstance(cause, SiblingFailure) else ""
    return "" if error is None else f"{type(error).__name__}: {error}{told}"


def assert_equal(a: Any, b: Any) -> None:
    """Assert that two results of a `Job` are equal, bit by bit."""
    assert a[:3] == b[:3]
    assert all(torch.equal(a[3][name], b[3][name]) for name in b[3])


UNEQUAL = {
    "other samples": "training, batch 0: the ranks of one pipeline loaded different batches",
    "other rows": "training, batch 0: the ranks of one pipeline loaded different batches",
    "fewer batches": "the training data of some ranks end with batch 2",
}
