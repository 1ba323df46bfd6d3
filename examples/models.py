"""Three ordinary LightningModules. They contain no code for the pipeline."""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn


class Task(L.LightningModule):
    """Base class that trains with AdamW and a linear warm-up, and logs train_loss, val_loss and val_accuracy."""

    layers: nn.Sequential

    def __init__(self, lr: float = 1e-3, weight_decay: float = 0.01, warmup: int = 0) -> None:
        super().__init__()
        self.lr, self.weight_decay, self.warmup = lr, weight_decay, warmup

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x).flatten(0, -2), y.flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        scores = self(x)
        self.log("val_loss", F.cross_entropy(scores.flatten(0, -2), y.flatten()), prog_bar=True)
        self.log("val_accuracy", (scores.argmax(-1) == y).float().mean())

    def configure_optimizers(self) -> OptimizerLRScheduler:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.lr, weight_decay=self.weight_decay)
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (self.warmup + 1)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


class Embedding(nn.Module):
    """Embeds bytes of shape (batch, context) as vectors of shape (batch, context, width), with their positions."""

    def __init__(self, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, width)
        self.place = nn.Parameter(torch.randn(context, width) * 0.02)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.byte.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.byte(x) + self.place[: x.shape[1]])  # type: ignore[no-any-return]


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each with a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, context, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout * self.training)
        x = x + self.drop(self.mix(seen.transpose(1, 2).reshape(batch, context, width)))
        return x + self.drop(self.feed(self.norm2(x)))  # type: ignore[no-any-return]


class GPT(Task):
    """A language model that predicts the next byte. Embedding, blocks and head are in one nn.Sequential."""

    def __init__(
        self,
        context: int = 128,
        width: int = 128,
        heads: int = 4,
        blocks: int = 4,
        dropout: float = 0.1,
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        warmup: int = 0,
    ) -> None:
        if width % heads:
            raise ValueError(
                f"GPT: width {width} is not a multiple of heads {heads}. Change model.width or model.heads."
            )
        super().__init__(lr, weight_decay, warmup)
        self.save_hyperparameters()
        self.layers = nn.Sequential(
            Embedding(context, width, dropout),
            *(Block(width, heads, dropout) for _ in range(blocks)),
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256)),
        )


class MLP(Task):
    """A multi-layer perceptron for images of shape (batch, 1, 8, 8)."""

    def __init__(
        self,
        width: int = 256,
        blocks: int = 4,
        dropout: float = 0.1,
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        warmup: int = 0,
    ) -> None:
        super().__init__(lr, weight_decay, warmup)
        self.save_hyperparameters()
        hidden = (nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout)) for _ in range(blocks))
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Sequential(nn.Linear(64, width), nn.ReLU()), *hidden, nn.Linear(width, 10)
        )


class Residual(nn.Module):
    """Two convolutions with batch norm and a residual connection. The output has the shape of the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


class ResNetDigits(Task):
    """A small residual network for images of shape (batch, 1, 8, 8)."""

    def __init__(
        self,
        channels: int = 16,
        blocks: int = 4,
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        warmup: int = 0,
    ) -> None:
        super().__init__(lr, weight_decay, warmup)
        self.save_hyperparameters()
        self.layers = nn.Sequential(
            nn.Sequential(nn.Conv2d(1, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()),
            *(Residual(channels) for _ in range(blocks)),
            nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 10)),
        )


def make_gpt() -> tuple[GPT, Tensor]:
    """Return a GPT and an input, for `lightning-pipes profile model=examples.models:make_gpt`."""
    return GPT(), torch.randint(256, (8, 128))
