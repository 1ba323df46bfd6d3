"""Accuracy by epochs with the schemes of the paper's table 7, compared with a run without micro-batches (figure 10).

The networks of the paper have four 3 x 3 convolutions and a linear layer, with one layer on each of five processes and
batches of 64 samples. The run without micro-batches uses one process without a pipeline. MNIST and CIFAR10 would have
to be downloaded, so the handwritten digits of scikit-learn replace them. For MNIST they are used unchanged. For CIFAR10
they are enlarged to its shape (3, 32, 32), in a random color on a background of another color, with noise. The network
for CIFAR10 halves its images after each convolution.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness.report import QUIET, Output, hush
from lightning_pipes import PipelineStrategy
from lightning_pipes.testing.ranks import run_ranks


class Case(NamedTuple):
    """A network of the paper.

    Attributes:
        channels: the number of channels of images, and after each convolution.
        schemes: the number of micro-batches of each layer, by name.
    """

    channels: tuple[int, ...]
    schemes: dict[str, tuple[int, ...]]


CASES = {
    "mnist": Case(
        (1, 20, 40, 80, 160),
        {
            "GPipe-2": (2, 2, 2, 2, 2),
            "U1": (2, 2, 2, 1, 2),
            "U2": (2, 2, 1, 2, 1),
            "U3": (2, 2, 2, 2, 4),
            "U4": (2, 8, 4, 1, 1),
            "U5": (4, 2, 4, 8, 1),
        },
    ),
    "cifar": Case(
        (3, 16, 32, 64, 128),
        {
            "GPipe-2": (2, 2, 2, 2, 2),
            "U1": (2, 2, 1, 2, 2),
            "U2": (2, 2, 1, 1, 2),
            "U3": (2, 1, 2, 2, 1),
            "U4": (8, 2, 1, 1, 1),
            "U5": (2, 2, 4, 2, 2),
        },
    ),
}


class LitDigits(pl.LightningModule):
    """A network of the paper, which records its accuracy on held-out images after every epoch."""

    def __init__(self, channels: tuple[int, ...]) -> None:
        super().__init__()
        pool = [nn.MaxPool2d(2)] if channels[0] == 3 else []
        convolutions = [
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), *pool) for a, b in itertools.pairwise(channels)
        ]
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], 10))
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


def in_colours(images: torch.Tensor) -> torch.Tensor:
    """Return images of CIFAR10's shape in random colors with noise: (n, 1, 8, 8) becomes (n, 3, 32, 32)."""
    generator = torch.Generator().manual_seed(2)
    shape = F.interpolate(images, 32, mode="bilinear")
    ink, paper = torch.rand(2, len(images), 3, 1, 1, generator=generator)
    noise = torch.randn(len(images), 3, 32, 32, generator=generator)
    return torch.lerp(paper.expand_as(noise), ink.expand_as(noise), shape) + 0.1 * noise


def data(network: str, train: bool) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Return a loader of four fifths of the images for training, or of the others in one batch."""
    images, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(digits)
    x = in_colours(x) if network == "cifar" else x
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    part = order[: len(x) * 4 // 5] if train else order[len(x) * 4 // 5 :]
    shuffled = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(x[part], y[part]), 64 if train else len(part), shuffle=train, generator=shuffled)


def accuracies(rank: int, network: str, scheme: tuple[int, ...] | None, epochs: int, double: bool) -> list[float]:
    """Train, and return the accuracy after each epoch."""
    hush()
    pl.seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    module = LitDigits(CASES[network].channels)
    partition = list(range(1, len(scheme or ())))
    strategy = PipelineStrategy("umpipe", schedule_args={"forward": scheme}, partition=partition) if scheme else "auto"
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=len(scheme) if scheme else 1,
        strategy=strategy,
        max_epochs=epochs,
        precision="64-true" if double else "32-true",
        **QUIET,
    )
    trainer.fit(module, data(network, True), data(network, False))
    return module.accuracies


def accuracy(networks: Sequence[str], epochs: int, double: bool = False) -> Output:
    """Train networks unsplit and with each scheme, and yield their accuracies."""
    bits = 64 if double else 32
    for network in networks:
        unsplit = run_ranks(accuracies, 1, network, None, epochs, double, timeout=600)[0]
        yield f"{network}, {epochs} epochs, {bits} bits: accuracy, unsplit {unsplit[-1]:.4f}"
        for name, scheme in CASES[network].schemes.items():
            found = run_ranks(accuracies, len(scheme), network, scheme, epochs, double, timeout=600)[0]
            apart = max(abs(a - b) for a, b in zip(found, unsplit, strict=True))
            yield f"{name:8} {scheme}: {found[-1]:.4f}; largest difference from unsplit {apart:.4f}"
            yield {f"{network}_{name}": round(found[-1], 4), f"{network}_{name}_apart": round(apart, 4)}
        yield {f"{network}_unsplit": round(unsplit[-1], 4)}
