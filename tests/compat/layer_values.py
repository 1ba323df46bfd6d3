"""LightningModules whose hooks read what layers keep: counters, statistics, lists; and states of optimizers."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils import _pytree as pytree

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


class Growing(nn.Module):
    """Adds up a number of each sample, and scales by what it has added up before.

    Args:
        where: the attribute that has the sums.
    """

    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear, self.where = nn.Linear(WIDTH, WIDTH), where
        self.register_buffer("loads", torch.zeros(WIDTH, dtype=torch.int64))
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))
        self.replaced = torch.zeros(WIDTH, dtype=torch.float64)
        self.pair, self.history = [0.0, torch.zeros(WIDTH, dtype=torch.float64)], list[float]()
        self.table = {"sum": 0.0, "inside": {"vector": torch.zeros(WIDTH, dtype=torch.float64)}}

    @property
    def sum(self) -> float:
        """All that was added up."""
        return sum(map(float, (torch.as_tensor(leaf).sum() for leaf in pytree.tree_leaves(getattr(self, self.where)))))

    def forward(self, x: Any) -> Any:
        scale, y = 1 + 0.001 * self.sum, self.linear(x).tanh()
        each = y.detach().abs()
        number = float(each.sum())
        self.loads.add_(torch.bincount(each.argmax(1), minlength=WIDTH))
        self.total += each.sum()
        self.replaced = self.replaced + each.sum(0)
        self.pair[0] += number
        self.pair[1] += each.sum(0)
        self.history.append(number)
        self.table["sum"] += number
        self.table["inside"]["vector"] += each.sum(0)
        return y * scale


class Grows(Annealed):
    """Layers that add up in training and in evaluation, which hooks read after each batch."""

    def __init__(self) -> None:
        super().__init__()
        places = ("loads", "total", "replaced", "pair", "history", "table")
        self.model = nn.Sequential(*map(Growing, places), nn.Linear(WIDTH, 3))

    def on_train_batch_end(self, *_: Any) -> None:
        self.beta = 0.001 * sum(layer.sum for layer in list(self.model)[:6])

    on_validation_batch_end = on_train_batch_end


class Loaded(nn.Module):
    """Counts how many samples of the latest batch have which largest value, and adds a bias that hooks set by that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.load = nn.Linear(WIDTH, WIDTH), torch.zeros(WIDTH, dtype=torch.float64)
        self.register_buffer("written", torch.zeros(WIDTH, dtype=torch.int64))
        self.register_buffer("bias", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x: Any) -> Any:
        y = self.linear(x).tanh() + self.bias
        counts = torch.bincount(y.argmax(1), minlength=WIDTH)
        self.load = counts.double()
        self.written.copy_(counts)
        return y


class BalancesLoads(Annealed):
    """Layers whose biases follow the loads of the latest batch, and a step that counts its samples and labels."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(Loaded() for _ in range(5)), nn.Linear(WIDTH, 3))
        self.samples, self.labels = 0, 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.samples, self.labels = len(batch[0]), float(batch[1].sum())
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("load", torch.stack([layer.load for layer in list(self.model)[:5]]).max())
        for layer in list(self.model)[:5]:
            layer.bias += 0.01 * torch.sign(layer.load.mean() - layer.load) + 0.001 * layer.written
        self.beta = 0.01 * self.samples + 0.01 * self.labels


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
