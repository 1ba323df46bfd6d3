"""A small training in which a fault occurs on some ranks, at a known step and place."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness import namespaces
from lightning_pipes import PipelineStrategy
from lightning_pipes.testing.ranks import RankResult
from tests.trainer.lit import quiet
from tests.trainers import make_trainer

EPOCHS, STEPS, ROWS, WIDTH = 3, 3, 8, 6
PLACES = ("forward", "backward", "step", "save", "validation")
STEP = STEPS + 1
"""The first step in which the fault can occur. It is in the second epoch, after the checkpoint of the first epoch."""


@dataclass(frozen=True)
class Run:
    """The description of one training, which all its ranks receive.

    Attributes:
        directory: the directory of the last checkpoint and of the losses.
        harm: the fault that happens to `victims`: a key of `HARM`, or "nan"; empty for no fault.
        place: the place of the fault in the second epoch.
        victims: the ranks with the fault.
        resume: whether training continues from the last checkpoint.
        strategy: additional arguments of the strategy.
        trainer: additional arguments of the trainer.
    """

    directory: str
    harm: str = ""
    place: str = ""
    victims: tuple[int, ...] = ()
    resume: bool = False
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)


class Net(pl.LightningModule):
    """Linear layers with dropout. Rank 0, which runs the last stage, writes each loss to a file without rounding."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(*[self.block() for _ in range(6)])
        self.directory = directory
        self.poisoned = -1
        """The batch whose loss is NaN."""

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        number = self.trainer.fit_loop.total_batch_idx
        loss = ((self.layers(batch[0]) - batch[1]) ** 2).mean()
        if number == self.poisoned:
            loss = loss * torch.nan
        self.log("train_loss", loss)
        if self.trainer.is_global_zero:
            with open(Path(self.directory, "losses.txt"), "a") as file:
                file.write(f"{number} {float(loss).hex()}\n")
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", ((self.layers(batch[0]) - batch[1]) ** 2).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ValueError("a bad day")


def stop() -> None:
    """Stop the whole process until it receives SIGCONT."""
    os.kill(os.getpid(), signal.SIGSTOP)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.01)  # the handler runs here, not some instructions later


def be_busy() -> None:
    time.sleep(BUSY_SECONDS)


def requeue() -> None:
    """Send the signal that SLURM sends before the time limit of a job."""
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.01)


BUSY_SECONDS = 9.0
HARM: dict[str, Callable[[], None]] = {
    "kill": kill,
    "raise": fail,
    "stop": stop,
    "term": terminate,
    "be busy": be_busy,
    "cut": namespaces.cut,
    "requeue": requeue,
}


class Harm(Callback):
    """A callback that causes the fault in its own process once."""

    def __init__(self, run: Run) -> None:
        self.act, self.place = HARM[run.harm], run.place
        self.done = False

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        def here(*_: Any) -> None:
            wanted = self.place == ("validation" if trainer.validating else "forward")
            self.harm(trainer, wanted)

        layers = module.layers.children()  # hooks see the layers of all ranks
        mine = next(layer for layer in layers if not any(p.is_meta for p in layer.parameters()))
        mine.register_forward_pre_hook(here)
        if self.place == "backward":
            mine.register_full_backward_pre_hook(lambda *_: self.harm(trainer))
        if self.place == "step":
            trainer.optimizers[0].register_step_pre_hook(lambda *_: self.harm(trainer))

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.harm(trainer, self.place == "save")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.harm(trainer, self.place == "batch end")

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.harm(trainer, self.place == "epoch end")

    def harm(self, trainer: pl.Trainer, wanted: bool = True) -> None:
        if wanted and not self.done and trainer.global_step >= STEP:
            self.done = True
            Path(trainer.lightning_module.directory, f"harmed{trainer.global_rank}").write_text(str(time.monotonic()))
            self.act()


def pairs(seed: int, rows: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(*torch.randn(2, rows, WIDTH, generator=generator))


def train(rank: int, run: Run) -> dict[str, Any]:
    """Train on this rank of WORLD_SIZE ranks, and return the number of steps and the last loss."""
    quiet()
    Path(run.directory, f"pid{rank}").write_text(str(os.getpid()))
    last = Path(run.directory, "last.ckpt")
    saver = ModelCheckpoint(run.directory, filename="last", enable_version_counter=False)
    options: dict[str, Any] = {"devices": int(os.environ.get("WORLD_SIZE", "1")), "callbacks": [], **run.trainer}
    harm = [Harm(run)] if rank in run.victims and run.harm != "nan" else []
    trainer = make_trainer(
        strategy=PipelineStrategy(**{"microbatches": 4, "check_loss": False, **run.strategy}),
        max_epochs=EPOCHS,
        num_sanity_val_steps=0,
        callbacks=[saver, *harm, *options.pop("callbacks")],
        **options,
    )
    net = Net(run.directory)
    if run.harm == "nan":
        net.poisoned = STEP
    trainer.fit(
        net,
        DataLoader(pairs(0, STEPS * ROWS), batch_size=ROWS),
        DataLoader(pairs(1, ROWS), batch_size=ROWS),
        ckpt_path=str(last) if run.resume and last.exists() else None,
    )
    return {"steps": trainer.global_step, "loss": trainer.callback_metrics["train_loss"].item()}


def train_all(rank: int, runs: list[Run]) -> list[dict[str, Any]]:
    """Run several trainings in the same processes."""
    return [train(rank, run) for run in runs]


def losses(directory: str | Path) -> dict[int, set[str]]:
    """Return the losses of the micro-batches of every step, without rounding.

    A step that ran twice must give the same losses, so that it adds no values.
    """
    found: dict[int, set[str]] = {}
    for line in Path(directory, "losses.txt").read_text().splitlines():
        step, bits = line.split()
        found.setdefault(int(step), set()).add(bits)
    return found


def seconds_after(outcomes: list[RankResult], first: int) -> float:
    """Return the seconds from the end of rank `first` to the end of the last rank."""
    return max(o.seconds for o in outcomes) - outcomes[first].seconds
