"""A language model of sequences of different lengths, and its batches, for tests of micro-batches by tokens."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F

WORDS, WIDTH = 11, 8
LENGTHS = ([2, 9, 4, 29, 6, 5, 11, 3, 3, 7, 16, 8], [5] * 8, [21, 3, 4, 4, 2, 3, 19], [6, 2, 9])
"""The lengths of the sequences of the batches. The second batch is not padded, and the last one is too small."""


def batch_of(lengths: list[int], leading: bool = False) -> dict[str, Any]:
    """Return a batch like the batches of the collators of transformers, with further columns."""
    generator = torch.Generator().manual_seed(sum(lengths))
    places, ends = torch.arange(max(lengths))[None], torch.tensor(lengths)[:, None]
    mask = (places >= max(lengths) - ends if leading else places < ends).long()
    tokens = torch.randint(1, WORDS, mask.shape, generator=generator) * mask
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": tokens.masked_fill(mask == 0, -100),
        "number": torch.arange(len(lengths)),
        "names": [f"sample {n}" for n in range(len(lengths))],
    }


class Attention(nn.Module):
    """Attention to earlier tokens only."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        later = torch.full((x.size(1), x.size(1)), float("-inf"), dtype=x.dtype).triu(1)
        return x + self.inner(x, x, x, attn_mask=later, need_weights=False)[0]


class LitCausal(pl.LightningModule):
    """A causal language model whose loss is a mean over the labels that are not ignored."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        middle = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout)) for _ in range(3)]
        layers = [layer for each in middle for layer in (Attention(), each)]
        self.layers = nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers, nn.Linear(WIDTH, WORDS))
        self.seen: list[torch.Tensor] = []
        self.shapes: set[tuple[int, ...]] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.layers(batch["input_ids"])
        self.shapes |= {tuple(batch["input_ids"].shape)}
        labels = batch["labels"][:, 1:]
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten())
        right = (logits[:, :-1].argmax(-1) == labels)[labels != -100]
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", right.double().mean(), on_step=True, batch_size=len(labels))
        self.log("length", batch["attention_mask"].double().sum(1).mean(), on_step=True, batch_size=len(labels))
        of_samples = (logits * batch["attention_mask"][..., None]).sum((1, 2)).detach()
        self.seen.append(of_samples)
        return {"loss": loss, "each": of_samples, "number": batch["number"], "names": batch["names"]}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.layers(batch["input_ids"])
        self.log("val", F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()), batch_size=len(logits))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layers(batch["input_ids"]).argmax(-1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)
