"""LightningModules of rows about the state of modules other than weights."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn

from tests.trainer.lit import WIDTH, Lit


def modes(trainer: pl.Trainer, folder: Path) -> dict[str, bool]:
    """Return whether each module on this rank is in training mode, by name."""
    module = trainer.lightning_module
    return {name: part.training for name, part in module.named_modules() if "metric" not in name}


class FrozenNorms(Lit):
    """A module whose normalization and dropout layers are in eval mode, while its weights are trained."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        for at in (1, 5):
            self.model[at] = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
            self.model[at].running_mean.fill_(0.3)
            self.model[at].eval()
        for at in (0, 2, 4, 6):
            self.model[at].eval()


class PartlyFrozen(Lit):
    """A module in which the dropout inside each layer, and the code after the layers, are in eval mode."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        for at in (0, 2, 4, 6):
            self.model[at][1].eval()
        self.after = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 3)).eval()

    def forward(self, x: Any) -> Any:
        return self.after(self.model(x))


# ---- attributes set in hooks


class Annealed(Lit):
    """A module that scales its input and its loss by `beta`, which subclasses set."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = 0.5

    def forward(self, x: Any) -> Any:
        return self.model(x * (1 + self.beta))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss * (1 + self.beta)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        pass


class AnnealedByEpoch(Annealed):
    def on_train_epoch_end(self) -> None:
        self.beta *= 0.5 ** (self.trainer.current_epoch + 1)


class AnnealedByMetric(Annealed):
    """A module that sets `beta` from logged metrics."""

    def on_validation_epoch_end(self) -> None:
        self.beta = float(self.trainer.callback_metrics["val_loss"]) / 10

    def on_train_epoch_end(self) -> None:
        self.threshold = self.trainer.callback_metrics["train_loss"]
        self.beta += self.threshold.item() / 10


class AnnealedByBatch(Annealed):
    """A module whose validation steps store losses, from which `on_validation_batch_end` sets `beta`."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.kept.append({"loss": loss, "rows": len(batch[0])})
        self.log("val_loss", loss)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.beta = 0.9 * self.beta + 0.01 * float(self.kept[-1]["loss"])

    def on_validation_epoch_end(self) -> None:
        rows = sum(each["rows"] for each in self.kept)
        self.log("mean", sum(each["loss"] * each["rows"] for each in self.kept) / rows)
        self.kept = []


class SetsBeta(pl.Callback):
    """A callback that sets `beta` from a metric, and from the loss that each step stores in the module."""

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        module.beta = float(module.last_loss)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.beta += float(module.last_loss) / 10

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        module.beta += float(trainer.callback_metrics["val_loss"]) / 10


class KeepsLoss(Annealed):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.last_loss = loss.detach()
        return loss


class Thawing(Lit):
    """A module that freezes and unfreezes layers in hooks, including the first and the last one."""

    def on_train_epoch_end(self) -> None:
        self.model[0].requires_grad_(False)
        self.model[2].requires_grad_(True)

    def on_validation_epoch_end(self) -> None:
        self.seen.clear()
        self.model[8].requires_grad_(self.current_epoch > 0)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 0:
            self.model[2].requires_grad_(False)


class Hooked(Lit):
    """A module that registers hooks on layers of all stages at the end of the first epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.handle = None

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            for at in (0, 4, 8):
                self.model[at].register_forward_hook(lambda layer, args, out: out * 0.5)
            self.model[2].register_forward_pre_hook(lambda layer, args: (args[0] + 0.1,))


class Config:
    """Settings that a module and its layers share."""

    def __init__(self) -> None:
        self.scale = 1.0
        self.history: list[float] = []


class Scaled(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.config = config

    def forward(self, x: Any) -> Any:
        return self.linear(x).tanh() * self.config.scale


class LitConfig(Annealed):
    """A module whose layers read settings that a hook changes."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.model = nn.Sequential(*(Scaled(self.config) for _ in range(5)), nn.Linear(WIDTH, 3))

    def on_train_epoch_end(self) -> None:
        self.config.scale *= 0.7
        self.config.history.append(self.config.scale)


class LitConfigBySteps(LitConfig):
    """A module whose layers read settings that the step changes after it has called the layers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.config.scale = 0.5 + float(loss.detach()) / 10
        return loss


# ---- values that steps set


class Counting(Annealed):
    """A module that scales its loss by counters of steps and samples: integers, a float and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.progress, self.rows = 0, 0.0, 0
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        self.beta = min(1.0, self.steps / 10) + float(self.calls) / 10 + self.progress + self.rows / 100
        loss = super().training_step(batch, batch_idx)
        self.progress += 0.05
        self.calls += 1
        self.rows += len(batch[0])
        self.log("calls", float(self.calls))
        return loss


class Averaging(Annealed):
    """A module with running averages of its loss, inputs and outputs, in attributes and in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.average = 1.0
        self.register_buffer("center", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("offset", torch.zeros(WIDTH, dtype=torch.float64))
        self.stats = {"loss": torch.zeros((), dtype=torch.float64), "n": 0}

    def forward(self, x: Any) -> Any:
        return self.model(x + self.offset + self.stats["loss"]) - self.center

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y) * self.average
        with torch.no_grad():
            self.center.mul_(0.9).add_(logits.mean(0), alpha=0.1)
            self.offset = 0.9 * self.offset + 0.1 * x.mean(0)
        self.average = 0.9 * self.average + 0.1 * float(loss)
        self.stats["loss"] = self.stats["loss"] * 0.5 + loss.detach() * 0.1
        self.stats["n"] += 1
        self.log("average", self.average)
        self.log("n", float(self.stats["n"]))
        return loss


class Summing(Annealed):
    """A module that counts correct answers and samples, and collects its outputs.

    It logs statistics of them at the end of an epoch, and scales the next losses by them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.right = torch.tensor(0)
        self.total = 0
        self.outputs: list[Any] = []
        self.answers: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y) * (1 + self.total / 100)
        self.right = self.right + (logits.argmax(1) == y).sum()
        self.total += len(y)
        self.outputs.append({"loss": loss.detach(), "logits": logits.detach()})
        self.answers.extend(logits.argmax(1).tolist())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("share", self.right / self.total)
        self.log("entries", float(len(self.outputs)))
        self.log("answers", float(len(self.answers)) + sum(self.answers) / 1000)
        self.log("norm", torch.cat([each["logits"] for each in self.outputs]).norm())
        self.beta = float(torch.stack([each["loss"] for each in self.outputs]).mean()) / 10
        self.outputs.clear()
        self.right, self.total = torch.zeros_like(self.right), 0


class Largest(Annealed):
    """A module that stores the largest and the smallest logit of all batches, and scales its loss by them."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = torch.tensor(0.0, dtype=torch.float64)
        self.smallest = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y) * (1 + self.largest - self.smallest)
        self.largest = torch.maximum(self.largest, logits.detach().max())
        self.smallest = min(self.smallest, float(logits.min()))
        return loss


class Spread(Annealed):
    """A module that stores the standard deviation of a batch's logits, and scales the next loss by it.

    A standard deviation is not a mean over samples.
    """

    def __init__(self) -> None:
        super().__init__()
        self.spread = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y) * self.spread
        self.spread = float(logits.detach().std()) + 1
        return loss


class SumsLosses(Annealed):
    """A module that adds up the losses of samples, and scales the next batch by the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.total += float(loss.detach()) * len(batch[0])
        self.beta = self.total / 100
        return loss


# ---- values that layers store


class Expert(nn.Module):
    """A layer that stores an auxiliary loss, a list of losses, and a mean in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.aux: Any = None
        self.losses: list[Any] = []
        self.register_buffer("usage", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x: Any) -> Any:
        y = self.linear(x).tanh()
        self.aux = (y**2).mean()
        self.losses.append(y.abs().mean())
        self.usage = y.mean(0)
        return y


class Experts(Annealed):
    """A module that adds the values stored by its layers to its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(Expert() for _ in range(5)), nn.Linear(WIDTH, 3))

    def loss(self, batch: Any) -> Any:
        loss = super().loss(batch)
        experts = [layer for layer in self.model if isinstance(layer, Expert)]
        extra = sum(0.1 * layer.aux + 0.2 * sum(layer.losses) + 0.1 * layer.usage.sum() for layer in experts)
        for layer in experts:
            layer.losses.clear()
        self.log("extra", extra)
        return loss + extra


class BufferedExpert(nn.Module):
    """A layer that stores auxiliary losses in its own buffer, and in an unsaved buffer of a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("aux", torch.zeros((), dtype=torch.float64))
        self.router = nn.Module()
        self.router.register_buffer("usage", torch.zeros(WIDTH, dtype=torch.float64), persistent=False)

    def forward(self, x: Any) -> Any:
        y = self.linear(x).tanh()
        self.aux = (y**2).mean()
        self.router.usage = y.abs().mean(0)
        return y


class BufferedExperts(Annealed):
    """A module that adds the buffers of its layers to its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(BufferedExpert() for _ in range(7)), nn.Linear(WIDTH, 3))

    def loss(self, batch: Any) -> Any:
        loss = super().loss(batch)
        experts = [layer for layer in self.model if isinstance(layer, BufferedExpert)]
        extra = sum(0.5 * layer.aux + layer.router.usage.sum() for layer in experts)
        self.log("extra", extra)
        return loss + extra


class AddsUp(nn.Module):
    """A layer that adds to its stored loss until the step resets it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.aux: Any = 0.0

    def forward(self, x: Any) -> Any:
        y = self.linear(x).tanh()
        self.aux = self.aux + (y**2).mean()
        return y


class TakesLosses(Annealed):
    """A module that adds the losses stored by its layers to its own loss, and resets them.

    A hook logs the sum that is left after each batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(AddsUp() for _ in range(5)), nn.Linear(WIDTH, 3))

    def loss(self, batch: Any) -> Any:
        loss = super().loss(batch)
        for layer in [layer for layer in self.model if isinstance(layer, AddsUp)]:
            loss = loss + 0.3 * layer.aux
            layer.aux = 0.0
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("left", float(sum(layer.aux for layer in self.model if isinstance(layer, AddsUp))))


class SharedLosses(Annealed):
    """A module whose layers append to a list of the module, which each step clears before it calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.extra: list[Any] = []
        self.model = nn.Sequential(*(Appending(self.extra) for _ in range(5)), nn.Linear(WIDTH, 3))

    def loss(self, batch: Any) -> Any:
        self.extra.clear()
        loss = super().loss(batch)
        self.log("entries", float(len(self.extra)))
        return loss + 0.1 * sum(self.extra)


class Appending(nn.Module):
    def __init__(self, extra: list[Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.extra = extra

    def forward(self, x: Any) -> Any:
        y = self.linear(x).tanh()
        self.extra.append((y**2).mean())
        return y


class Collected(Annealed):
    """A module whose forward hooks collect activations of all stages, from which it computes a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[int, Any] = {}
        self.last: Any = None
        for at in (1, 3, 5, 7):
            self.model[at].register_forward_hook(self.collecting(at))

    def collecting(self, at: int) -> Any:
        def hook(layer: Any, args: Any, out: Any) -> None:
            self.features[at] = out
            self.last = out.detach()

        return hook

    def loss(self, batch: Any) -> Any:
        loss = super().loss(batch)
        self.log("last", self.last.mean())
        return loss + sum((feature**2).mean() for feature in self.features.values())


# ---- aliases


class Doubling(nn.Module):
    """A layer that returns the same tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        h, other = x if isinstance(x, tuple) else (x, x)
        h = self.linear(h + 0.1 * other.clone().tanh())
        return h, h


class Adding(nn.Module):
    """A layer that changes one of its two inputs in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        h, other = x
        h.add_(1.0)
        return self.linear(h.tanh()) + other.tanh(), other


class Joining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)

    def forward(self, x: Any) -> Any:
        return self.linear(x[0] + x[1])


class Aliased(Annealed):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(Doubling(), Doubling(), Adding(), Adding(), Joining())


class Viewing(Doubling):
    """A layer that returns a tensor and a view of it."""

    def forward(self, x: Any) -> Any:
        h, _ = super().forward(x)
        return h, h[:, : WIDTH // 2]


class AddingToView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        h, view = x
        view.add_(1.0)
        return self.linear(h.tanh()), h


class AliasedView(Annealed):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(Doubling(), Viewing(), AddingToView(), Doubling(), Joining())


class Warming(nn.Module):
    """A layer that counts its calls, and scales its output by the count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.linear(x).tanh() * min(1.0, self.calls / 6)


class WarmingUp(Annealed):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(Warming() for _ in range(5)), nn.Linear(WIDTH, 3))


# ---- random generators that belong to the module


class Noisy(nn.Linear):
    """A layer that scales its output by a number from a generator, which other layers may share."""

    def __init__(self, generator: np.random.Generator) -> None:
        super().__init__(WIDTH, WIDTH)
        self.noise = generator

    def forward(self, x: Any) -> Any:
        return super().forward(x) * (1 + 0.2 * self.noise.random())


class OwnGenerators(Lit):
    """A module that draws from its own generators before and after the layers, and in hooks."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.generator, self.python = np.random.default_rng(1), random.Random(2)
        self.others = {"torch": torch.Generator().manual_seed(3), "numpy": np.random.RandomState(4)}
        if shared:
            for at in (0, 2, 6):
                self.model[at] = Noisy(self.generator)
        self.drawn: list[float] = []

    def draw(self) -> float:
        of_torch = float(torch.rand((), generator=self.others["torch"]))
        return self.generator.random() + self.python.random() + self.others["numpy"].rand() + of_torch

    def forward(self, x: Any) -> Any:
        return self.model(x * (1 + 0.2 * self.draw())) * (1 + 0.2 * self.draw())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.drawn.append(self.draw())


def drawn_next(trainer: pl.Trainer, folder: Path) -> list[float]:
    """Return the numbers that hooks drew in all batches, and the next number."""
    module = trainer.lightning_module
    return [*module.drawn, module.draw()]
