"""LightningModules whose hooks read values that layers store, such as counters, statistics and lists."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.compat.state_modules import Annealed
from tests.trainer.lit import WIDTH


class Keeping(nn.Module):
    """A layer that counts its calls, and stores statistics of its latest batch."""

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
    """Return a number that depends on the stored values of all layers."""
    layers = [layer for layer in module.model if isinstance(layer, Keeping)]
    return float(sum((n + 1) * (layer.calls + layer.usage.sum() + len(layer.mode)) for n, layer in enumerate(layers)))


class Kept(Annealed):
    """A module whose layers store values. A hook clears their lists when fit starts."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(Keeping() for _ in range(5)), nn.Linear(WIDTH, 3))

    def on_fit_start(self) -> None:
        for layer in self.model[:5]:
            layer.losses = []


class ReadByHooks(Kept):
    """A module that reads these values after each batch, and sets learning rates from them before each step."""

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
    """A module that reads the lists filled by its layers at the end of an epoch, and clears them."""

    def on_train_epoch_end(self) -> None:
        layers = list(self.model[:5])
        self.log("number", float(sum(len(layer.losses) for layer in layers)))
        self.log("total", sum(sum(layer.losses) for layer in layers))
        self.beta = sum(sum(layer.losses) for layer in layers) / 10
        for layer in layers:
            layer.losses.clear()


class InPlace(nn.Module):
    """A layer that counts its calls in place, and scales its output by the count.

    Args:
        where: the place of the counter: the attribute of a buffer or tensor, "dict", or "object".
    """

    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear, self.where = nn.Linear(WIDTH, WIDTH), where
        self.register_buffer("saved", torch.zeros((), dtype=torch.float64))
        self.register_buffer("unsaved", torch.zeros((), dtype=torch.float64), persistent=False)
        self.plain, self.table, self.thing = torch.zeros((), dtype=torch.float64), {"n": 0}, Thing()

    @property
    def count(self) -> float:
        """The number of calls."""
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
    """A layer that adds up a number from each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.total = nn.Linear(WIDTH, WIDTH), 0.0

    def forward(self, x: Any) -> Any:
        y = self.linear(x).tanh()
        self.total += float(y.detach().sum())
        return y


class ReadsSums(Annealed):
    """A module whose hook reads the sums of all layers, and sets the scale of the next loss from them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(Summing() for _ in range(5)), nn.Linear(WIDTH, 3))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.beta = 0.001 * sum(layer.total for layer in list(self.model)[:5])


class Growing(nn.Module):
    """A layer that adds up a number from each sample, and scales its output by the sum over earlier batches.

    Args:
        where: the attribute whose sum scales the output.
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
        """The sum of all numbers in the attribute `where`."""
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
    """A module whose layers add up values in training and in evaluation. Hooks read the sums after each batch."""

    def __init__(self) -> None:
        super().__init__()
        places = ("loads", "total", "replaced", "pair", "history", "table")
        self.model = nn.Sequential(*map(Growing, places), nn.Linear(WIDTH, 3))

    def on_train_batch_end(self, *_: Any) -> None:
        self.beta = 0.001 * sum(layer.sum for layer in list(self.model)[:6])

    on_validation_batch_end = on_train_batch_end


class Loaded(nn.Module):
    """A layer that counts the samples of the latest batch by the index of their largest value.

    It adds a bias to its output, which hooks set from these counts.
    """

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
    """A module whose hook adjusts the biases of layers to the loads of the latest batch.

    Its step stores the number of samples and the sum of the labels, which the hook reads, too.
    """

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
    """A layer that stores the standard deviation of its output, and scales the next output by it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.spread = nn.Linear(WIDTH, WIDTH), 1.0

    def forward(self, x: Any) -> Any:
        y = self.linear(x).tanh() * self.spread
        self.spread = 1 + float(y.detach().std())
        return y


class Deviations(Annealed):
    """A module whose first layer stores a value that is not a mean, a sum or an extreme over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(Deviating(), *(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.Linear(WIDTH, 3))


class Thing:
    """A user-defined object with a counter."""

    def __init__(self) -> None:
        self.n = 0


class CountsInPlace(Annealed):
    """A module whose layers count their calls in place.

    If `reads` is set, a hook sets the scale of the next step from these counts.
    """

    def __init__(self, where: str, reads: bool = False) -> None:
        super().__init__()
        self.reads = reads
        self.model = nn.Sequential(*(InPlace(where) for _ in range(5)), nn.Linear(WIDTH, 3))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.reads:
            self.beta = sum((n + 1) * layer.count for n, layer in enumerate(list(self.model)[:5])) / 1000
            self.log("count", self.beta)


class KeepsOutput(nn.Module):
    """A layer that stores a large tensor together with its graph, and returns a slice of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(WIDTH, WIDTH), torch.zeros(())

    def forward(self, x: Any) -> Any:
        self.out = self.linear(x).tanh().repeat(1, 2000)
        return self.out[:, :WIDTH]


class ReadsLargeOutputs(Annealed):
    """A module whose hook reads tensors that are too large to send to all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(KeepsOutput() for _ in range(5)), nn.Linear(WIDTH, 3))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("mean", float(sum(layer.out.detach().mean() for layer in list(self.model)[:5])))
