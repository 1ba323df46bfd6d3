"""Small modules that train differently in micro-batches, although the other checks find no difference."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

WIDTH, TOKENS = 6, 5


class Plain(pl.LightningModule):
    """Four layers, and a loss that is a mean over samples.

    Attributes:
        named: a part of the warning, without which the module trains differently in silence; or several ways to say it.
        batches: the number of batches of an epoch.
        epochs: the number of epochs.
    """

    named: tuple[str, ...] = ()
    batches, epochs = 2, 1

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)))
        self.build()

    def build(self) -> None:
        """Replace layers; subclasses override this method."""

    def loader(self) -> DataLoader[Any]:
        g = torch.Generator().manual_seed(1)
        rows = 8 * self.batches
        x, y = torch.randn(rows, WIDTH, generator=g).double(), torch.randn(rows, WIDTH, generator=g).double()
        tokens = torch.randint(0, TOKENS, (rows, 3), generator=g)
        return DataLoader(TensorDataset(x, y, tokens), batch_size=8)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y, tokens = batch
        return self.loss(self.net(self.enter(x, tokens)), y)

    def enter(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return x

    def loss(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(out, y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class _NormalizedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / gradient.norm()


class _NormalizedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.map(_NormalizedGradient.apply(x))  # type: ignore[no-any-return, no-untyped-call]


class NormalizedGradients(Plain):
    """A layer whose backward divides by the norm of the gradients of all samples."""

    named = ("the gradient of net.1.",)

    def build(self) -> None:
        self.net[2] = _NormalizedLayer()


class CenteredGradients(Plain):
    """A hook on the output of a layer that centers the gradients of all samples."""

    named = ("the gradient of net.2.",)

    def build(self) -> None:
        self.net[2].register_forward_hook(self.center)

    @staticmethod
    def center(layer: nn.Module, args: Any, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda gradient: gradient - gradient.mean(0))


class FrequentTokens(Plain):
    """An embedding whose gradients are divided by the numbers of tokens in a batch."""

    named = ("the gradient of embedding.weight",)

    def build(self) -> None:
        self.embedding = nn.Embedding(TOKENS, WIDTH, scale_grad_by_freq=True)

    def enter(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return x + self.embedding(tokens).mean(1)


class _QueuedLayer(nn.Module):
    queue: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("queue", torch.ones(8, WIDTH))
        self.next = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.map(x)
        similar = (out @ self.queue.clone().T).softmax(1) @ self.queue.clone()
        for row in out.detach():
            self.queue[self.next % 8] = row
            self.next += 1
        return out + similar


class Queue(Plain):
    """A layer that compares samples with a queue that it fills row by row."""

    named = ("sets self.net.1.queue",)

    def build(self) -> None:
        self.net[1] = _QueuedLayer()


class _RunningMean(nn.Module):
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(out, y)
        with torch.no_grad():
            self.mean.mul_(0.5).add_(loss.detach(), alpha=0.5)
        return loss / self.mean.item()


class RunningMean(Plain):
    """A criterion that divides the loss by its running mean over calls."""

    named = ("the loss is", "loss that is not a mean")

    def build(self) -> None:
        self.criterion = _RunningMean()

    def loss(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.criterion(out, y)  # type: ignore[no-any-return]


class LaterLoss(Plain):
    """A loss that uses several samples together from batch 9 on."""

    named = ("the loss is", "loss that is not a mean")
    batches = 18

    def loss(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(out, y) + (out.std() if self.global_step >= 9 else 0.0)


class LossOfEpoch(Plain):
    """A loss that uses several samples together from epoch 3 on."""

    named = ("the loss is", "loss that is not a mean")
    batches, epochs = 2, 5

    def loss(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(out, y) + (out.std() if self.current_epoch >= 3 else 0.0)


class _StoringLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.map(x)
        self.spread = out.std()
        return out


class Auxiliary(Plain):
    """A layer that stores an auxiliary loss without an axis of samples."""

    named = ("the loss is", "computes .spread")

    def build(self) -> None:
        self.net[1] = _StoringLayer()

    def loss(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(out, y) + self.net[1].spread


class Dropped(Plain):
    """Each sample by itself, with dropout in layers and around them."""

    def build(self) -> None:
        self.net[1] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3))
        self.net[3] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3))

    def enter(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.2)

    def loss(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(F.dropout(out, 0.2), y)


class _SmallBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if len(gradient) > 4:
            raise ValueError("too many samples")
        return gradient


class _SmallLayer(nn.Module):
    def __init__(self, in_backward: bool) -> None:
        super().__init__()
        self.map, self.in_backward = nn.Linear(WIDTH, WIDTH), in_backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_backward:
            x = _SmallBackward.apply(x)  # type: ignore[no-untyped-call]
        elif len(x) > 4:
            raise ValueError("too many samples")
        return self.map(x)  # type: ignore[no-any-return]


class SmallForward(Plain):
    """A layer of the first stage that does not run on a whole batch."""

    def build(self) -> None:
        self.net[0] = _SmallLayer(in_backward=False)


class SmallBackward(Plain):
    """A layer whose backward does not run on a whole batch."""

    def build(self) -> None:
        self.net[3] = _SmallLayer(in_backward=True)


FAULTS: list[type[Plain]] = [
    *(NormalizedGradients, CenteredGradients, FrequentTokens, Queue, RunningMean, LaterLoss, LossOfEpoch, Auxiliary),
]
EXACT: list[type[Plain]] = [Plain, Dropped]
FAILING: list[type[Plain]] = [SmallForward, SmallBackward]
