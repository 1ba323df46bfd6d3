"""Language models of sequences of different lengths, and their trainings, for tests of micro-batches by tokens."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from tests.trainer.lit import plain_values, quiet
from tests.trainers import make_trainer

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


class Kept(pl.Callback):
    """Records what hooks see, and the gradients of this rank."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.gradients: list[Any] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        here = {n: p.grad for n, p in module.named_parameters() if not p.is_meta and p.grad is not None}
        self.gradients.append(plain_values(here))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        seen = module.seen[-1] if module.seen else None
        self.steps.append(plain_values([dict(outputs), batch, dict(trainer.logged_metrics), seen]))


def fitted(kind: type[LitCausal], ranks: int, settings: dict[str, Any] | None, **options: Any) -> dict[str, Any]:
    """Train a module and return its weights, what hooks saw, its logs and its predictions."""
    quiet()
    pl.seed_everything(3, verbose=False)
    module, kept = kind(**options.pop("module", {})).double(), Kept()
    data = DataLoader([batch_of(each) for each in options.pop("lengths", LENGTHS)], batch_size=None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy: Any = "auto"
        if settings is not None:
            settings = {"microbatches": 4, "partition": "parameters", "microbatches_by": "tokens", **settings}
            strategy = PipelineStrategy(**settings)
        trainer = make_trainer(
            devices=ranks, strategy=strategy, max_epochs=1, callbacks=[kept], log_every_n_steps=1, **options
        )
        trainer.fit(module, data, data)
    found = {
        "weights": plain_values(dict(module.state_dict())),
        "steps": kept.steps,
        "gradients": kept.gradients,
        "metrics": plain_values(dict(trainer.callback_metrics)),
        "predicted": plain_values(trainer.predict(module, data)),
    }
    facts = strategy.report.record.facts if settings is not None else {}
    said = [str(w.message) for w in caught if "micro-batch" in str(w.message) or "one process" in str(w.message)]
    shapes = sorted(module.shapes)
    return {**found, "said": said, "by": facts.get("micro-batches weighted by", ""), "shapes": shapes}


@dataclass
class Head:
    """Plain values that a step passes to its layers."""

    scale: float
    name: str
    nothing: None = None


class FlexBlock(nn.Module):
    """Attention with the mask of flex attention. Flex attention has no gradients on CPUs, so the mask is made dense."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: Any, head: Head) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.into(x).chunk(3, -1))
        seen = create_mask(mask.mask_mod, *mask.shape, device="cpu")
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        assert (head.name, head.nothing) == ("flex", None)
        return x + head.scale * self.out(y.transpose(1, 2).flatten(-2))


def mask_of(kept: torch.Tensor) -> BlockMask:
    """Return the mask of causal attention to tokens."""

    def is_seen(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & kept[b, kv]

    return create_block_mask(is_seen, len(kept), None, kept.size(1), kept.size(1), device="cpu", BLOCK_SIZE=8)


class LitFlex(LitCausal):
    """A module whose layers get a mask of flex attention and an object with plain values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = None
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(FlexBlock() for _ in range(8))

    def forward(self, batch: Any) -> torch.Tensor:
        mask = batch["mask"] if "mask" in batch else mask_of(batch["attention_mask"].bool())
        x, head = self.embed(batch["input_ids"]), Head(0.5, "flex")
        for block in self.blocks:
            x = block(x, mask, head)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch)
        self.shapes |= {tuple(batch["input_ids"].shape)}
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self(batch).mean(), batch_size=len(batch["labels"]))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch).argmax(-1)


class LitMasked(LitFlex):
    """A module whose data loader makes the mask of flex attention."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "mask": mask_of(batch["attention_mask"].bool())}
