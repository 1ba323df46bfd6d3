"""Accuracy over epochs with the schemes of the paper's table 7, beside the unsplit run (figure 10).

    python benchmarks/papers/umpipe/accuracy.py [--epochs N] [--picture FILE]

The paper's network for MNIST (four 3 x 3 convolutions with 20, 40, 80 and 160 channels, and a linear layer), a layer on
each of five processes, batches of 64, on the images of handwritten digits that scikit-learn brings along: MNIST and
CIFAR10 themselves would have to be loaded from the internet. One process trains the same without a pipeline.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness.silence import QUIET
from lightning_pipes import PipelineStrategy
from lightning_pipes.testing.ranks import run_ranks

SCHEMES = {
    "GPipe-2": (2, 2, 2, 2, 2),
    "U1": (2, 2, 2, 1, 2),
    "U2": (2, 2, 1, 2, 1),
    "U3": (2, 2, 2, 2, 4),
    "U4": (2, 8, 4, 1, 1),
    "U5": (4, 2, 4, 8, 1),
}
CHANNELS = (1, 20, 40, 80, 160)


class LitDigits(pl.LightningModule):
    """The network, and the accuracy on held-out images after every epoch."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = [
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU()) for a, b in itertools.pairwise(CHANNELS)
        ]
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS[-1], 10))
        self.model = nn.Sequential(*convolutions, head)
        self.accuracies: list[float] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x), y)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("accuracy", (self.model(x).argmax(1) == y).float().mean())

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.accuracies.append(float(self.trainer.callback_metrics["accuracy"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def data(train: bool) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Four fifths of the images to train, shuffled by a seed; the others are one batch."""
    images, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(digits)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    part = order[: len(x) * 4 // 5] if train else order[len(x) * 4 // 5 :]
    shuffled = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(x[part], y[part]), 64 if train else len(part), shuffle=train, generator=shuffled)


def accuracies(rank: int, scheme: tuple[int, ...] | None, epochs: int) -> list[float]:
    """After each epoch."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pl.seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    module = LitDigits()
    partition = list(range(1, len(scheme or ())))
    strategy = PipelineStrategy("umpipe", schedule_args={"forward": scheme}, partition=partition) if scheme else "auto"
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=len(scheme) if scheme else 1,
        strategy=strategy,
        max_epochs=epochs,
        **QUIET,
    )
    trainer.fit(module, data(True), data(False))
    return module.accuracies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    found = {"unsplit": run_ranks(accuracies, 1, None, options.epochs, timeout=600)[0]}
    for name, scheme in SCHEMES.items():
        found[name] = run_ranks(accuracies, len(scheme), scheme, options.epochs, timeout=600)[0]
        last = found[name]
        apart = max(abs(a - b) for a, b in zip(last, found["unsplit"], strict=True))
        print(
            f"{name:8} {scheme}: {last[-1]:.4f} after {len(last)} epochs, unsplit {found['unsplit'][-1]:.4f}; never "
            f"further apart than {apart:.4f}",
            flush=True,
        )
    if options.picture:
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(7, 4))
        for name, values in found.items():
            axes.plot(range(1, len(values) + 1), values, label=name, alpha=0.7)
        axes.set(xlabel="epoch", ylabel="accuracy", title="Digits, five stages, the paper's schemes")
        axes.legend()
        figure.savefig(options.picture, dpi=120)


if __name__ == "__main__":
    main()
