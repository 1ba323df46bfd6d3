"""Stages whose layers are sharded by `fully_shard` and `parallelize_module`: they train as one process does.

`configure_model` is the one of Lightning's example for ModelParallelStrategy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipes import PipelineStrategy, consolidate
from lightning_pipes.testing.ranks import run_ranks
from tests.trainer.lit import differences, plain_values, quiet
from tests.trainer.replicas import REPLICAS, ROWS, Dealt
from tests.trainers import make_trainer

SAMPLES = 22  # the last batch of an epoch has 3 a replica, the others 4
TOKENS, WIDTH, HEADS = 11, 12, 4
LAYERS = 4


class Attention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.query, self.key, self.value = (nn.Linear(WIDTH, heads * self.head_dim, bias=False) for _ in range(3))
        self.out = nn.Linear(heads * self.head_dim, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.query, self.key, self.value))
        return self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(heads)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(F.gelu(self.up(x)))


class GPT(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(Block(heads) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class LitGPT(pl.LightningModule):
    def __init__(self, heads: int = HEADS, meta: bool = False) -> None:
        super().__init__()
        self.heads, self.meta = heads, meta
        self.model: GPT | None = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.model is not None:
            return
        torch.manual_seed(5)
        with torch.device("meta" if self.meta else "cpu"):
            self.model = GPT(self.heads).double()
        if self.device_mesh is None:
            return
        replicas, shards = self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"]
        if shards.size() > 1:
            columns = ["attention.query", "attention.key", "attention.value", "up"]
            plan = {name: ColwiseParallel() for name in columns}
            plan.update({name: RowwiseParallel() for name in ("attention.out", "down")})
            for layer in self.model.layers:
                parallelize_module(layer, shards, plan)
        if replicas.size() > 1:
            for layer in self.model.layers:
                fully_shard(layer, mesh=replicas)
            fully_shard(self.model, mesh=replicas)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.model(batch[0][:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.model(batch[0][:, :-1])
        self.log("val_loss", F.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten()), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Seen(pl.Callback):
    """Keeps what is logged, and the norm of gradients before they are clipped."""

    def __init__(self) -> None:
        self.logged: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.logged.append(float(trainer.logged_metrics["loss_step"]))

    def on_validation_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if "val_loss" in trainer.callback_metrics:
            self.logged.append(float(trainer.callback_metrics["val_loss"]))


def data(rows: int = SAMPLES) -> TensorDataset:
    return TensorDataset(torch.randint(TOKENS, (rows, 7), generator=torch.Generator().manual_seed(1)))


def train(
    path: Path,
    strategy: Any = "auto",
    devices: int = 1,
    resume: Path | None = None,
    replicas: int = 1,
    **module: Any,
) -> dict[str, Any]:
    """Train with clipping and accumulation, two epochs or one more, and save."""
    quiet()
    pl.seed_everything(3, verbose=False)
    lit, seen = LitGPT(**module), Seen()
    trainer = make_trainer(
        devices=devices,
        strategy=strategy,
        precision="64-true",
        max_epochs=2 if resume is None else 3,
        gradient_clip_val=0.05,
        accumulate_grad_batches=2,
        callbacks=[seen],
    )
    sampler = None if replicas == REPLICAS else Dealt(SAMPLES, shuffle=True)
    rows = ROWS * REPLICAS // replicas
    trainer.fit(lit, DataLoader(data(), rows, sampler=sampler), DataLoader(data(8), rows // 2), ckpt_path=resume)
    trainer.save_checkpoint(path)
    return {"logged": seen.logged}


def saved_in(path: Path) -> Any:
    """The weights and the optimizer states in a checkpoint, which have to be whole."""
    saved = torch.load(path, weights_only=False)
    return plain_values([saved["state_dict"], saved["optimizer_states"][0]["state"]])


CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "fsdp": (REPLICAS, {}, {}),
    "parts": (REPLICAS, {"checkpoint": "sharded", "recompute": True}, {}),
    "split": (REPLICAS, {"schedule": "zero_bubble"}, {}),
    "tensors": (1, {"tensor_parallel": 2}, {}),
}
"""The data-parallel replicas, and the arguments of the strategy and of the module, by the checkpoint's name."""


def train_sharded(rank: int, folder: str, names: tuple[str, ...], processes: int) -> dict[str, Any]:
    found = {}
    for name in names:
        replicas, settings, module = CASES[name]
        strategy = PipelineStrategy(**{"microbatches": 2, "data_parallel": replicas, **settings})
        found[name] = train(Path(folder, name), strategy, processes, replicas=replicas, **module)
    return found


def resume(rank: int, folder: str, names: tuple[str, ...], processes: int, replicas: int, shards: int) -> list[Any]:
    found = []
    for name in names:
        strategy = PipelineStrategy(microbatches=2, data_parallel=replicas, tensor_parallel=shards)
        path = Path(folder, f"{name} on {processes} {replicas} {shards}")
        found.append(train(path, strategy, processes, Path(folder, name), replicas)["logged"])
    return found


def test_two_stages_of_two_shards_are_one_process(tmp_path):
    whole = train(tmp_path / "plain")
    ranks = run_ranks(train_sharded, 4, str(tmp_path), tuple(CASES), 4, timeout=200)
    consolidate(tmp_path / "parts", tmp_path / "one file", weights_only=False)
    for name in CASES:
        for found in ranks:
            assert differences(found[name]["logged"], whole["logged"], tolerance=1e-10) == []
        path = tmp_path / ("one file" if name == "parts" else name)
        assert differences(saved_in(path), saved_in(tmp_path / "plain"), tolerance=1e-10) == []
    further = train(tmp_path / "plain on", resume=tmp_path / "plain")["logged"]
    resumed = [train(tmp_path / "on", resume=tmp_path / name)["logged"] for name in ("fsdp", "one file")]
    resumed += [e for r in run_ranks(resume, 2, str(tmp_path), ("fsdp", "parts"), 2, 1, 1, timeout=90) for e in r]
    resumed += [e for r in run_ranks(resume, 4, str(tmp_path), ("tensors",), 4, 2, 1, timeout=90) for e in r]
    for logged in resumed:
        assert differences(logged, further, tolerance=1e-10) == []
