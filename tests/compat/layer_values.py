"""LightningModules whose hooks read what layers keep: counters, statistics, lists; and states of optimizers."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from tests.compat.state_modules import Annealed
from tests.trainer.lit import WIDTH


class Keeping(nn.Module):
    """Counts its calls, and keeps statistics of its latest batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls, self.usage, self.mode = 0, torch.zeros(WIDTH, dtype=torch.float64), "none"
        self.losses: list[float] = []

    def forward(self, x: Any) -> Any:
        y = self.linear(x).tanh()
        self.calls += 1
        self.usage = y.detach().mean(0)
        self.mode = f"call {self.calls}"
        self.losses.append(float(y.detach().mean()))
        return y


def read(module: Any) -> float:
    """A number by what all layers keep."""
    layers = [layer for layer in module.model if isinstance(layer, Keeping)]
    return float(sum((n + 1) * (layer.calls + layer.usage.sum() + len(layer.mode)) for n, layer in enumerate(layers)))


class Kept(Annealed):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(Keeping() for _ in range(5)), nn.Linear(WIDTH, 3))

    def on_fit_start(self) -> None:
        for layer in self.model[:5]:
            layer.losses = []


class ReadByHooks(Kept):
    """Reads it after each batch, and sets learning rates by it before each step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (1 + abs(read(self)))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("read", read(self))


class ReadByCallback(pl.Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.05 / (1 + abs(read(module)))

    def on_validation_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        module.beta = 0.01 * read(module)


class ReadLists(Kept):
    """Reads the lists that layers have filled, and clears them."""

    def on_train_epoch_end(self) -> None:
        layers = list(self.model[:5])
        self.log("number", float(sum(len(layer.losses) for layer in layers)))
        self.log("total", sum(sum(layer.losses) for layer in layers))
        self.beta = sum(sum(layer.losses) for layer in layers) / 10
        for layer in layers:
            layer.losses.clear()


class InPlace(nn.Module):
    """Counts its calls in place: in buffers, a tensor, a dict and an object; scales by the first of them."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear, self.where = nn.Linear(WIDTH, WIDTH), where
        self.register_buffer("saved", torch.zeros((), dtype=torch.float64))
        self.register_buffer("unsaved", torch.zeros((), dtype=torch.float64), persistent=False)
        self.plain, self.table, self.thing = torch.zeros((), dtype=torch.float64), {"n": 0}, Thing()

    @property
    def count(self) -> float:
        """How often it was called."""
        match self.where:
            case "dict":
                return float(self.table["n"])
            case "object":
                return float(self.thing.n)
        return float(getattr(self, self.where))

    def forward(self, x: Any) -> Any:
        match self.where:
            case "dict":
                self.table["n"] += 1
            case "object":
                self.thing.n += 1
            case _:
                getattr(self, self.where).add_(1)
        return self.linear(x).tanh() * min(1.0, self.count / 20)


class Summing(nn.Module):
    """Adds up a number of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.total = nn.Linear(WIDTH, WIDTH), 0.0

    def forward(self, x: Any) -> Any:
        y = self.linear(x).tanh()
        self.total += float(y.detach().sum())
        return y


class ReadsSums(Annealed):
    """Reads the sums of all layers, which the step scales the loss by."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(Summing() for _ in range(5)), nn.Linear(WIDTH, 3))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.beta = 0.001 * sum(layer.total for layer in list(self.model)[:5])


class Deviating(nn.Module):
    """Keeps the standard deviation of what it returns for a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.spread = nn.Linear(WIDTH, WIDTH), 1.0

    def forward(self, x: Any) -> Any:
        y = self.linear(x).tanh() * self.spread
        self.spread = 1 + float(y.detach().std())
        return y


class Deviations(Annealed):
    """A layer of the first stage keeps what is no mean, sum or extreme over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(Deviating(), *(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.Linear(WIDTH, 3))


class Thing:
    """An object of the user's."""

    def __init__(self) -> None:
        self.n = 0


class CountsInPlace(Annealed):
    """Layers that count their calls, and where `reads` a hook that sets what the next step reads by that."""

    def __init__(self, where: str, reads: bool = False) -> None:
        super().__init__()
        self.reads = reads
        self.model = nn.Sequential(*(InPlace(where) for _ in range(5)), nn.Linear(WIDTH, 3))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.reads:
            self.beta = sum((n + 1) * layer.count for n, layer in enumerate(list(self.model)[:5])) / 1000
            self.log("count", self.beta)


class KeepsOutput(nn.Module):
    """Keeps what it has returned, with its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(WIDTH, WIDTH), torch.zeros(())

    def forward(self, x: Any) -> Any:
        self.out = self.linear(x).tanh().repeat(1, 2000)
        return self.out[:, :WIDTH]


class ReadsLargeOutputs(Annealed):
    """A hook reads tensors that are too large to be sent to all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(KeepsOutput() for _ in range(5)), nn.Linear(WIDTH, 3))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("mean", float(sum(layer.out.detach().mean() for layer in list(self.model)[:5])))
