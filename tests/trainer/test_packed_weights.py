"""Checks that adapters on frozen layers with packed weights, like those of bitsandbytes, train as in one process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy, consolidate
from lightning_pipes.engine.watch.failure import PeerFailure
from lightning_pipes.ir import PipelineError
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.user.user_objects import is_packed
from tests.trainer.lit import differences, plain_values, quiet
from tests.trainers import make_trainer

WIDTH = 6


class PackedWeight(nn.Parameter):
    """A parameter with two weights of four bits in each byte, and with the scales in an attribute."""

    scale: torch.Tensor | None


class PackedLinear(nn.Module):
    """A layer that moves the scales from the weight to its own state in its first forward, as Linear8bitLt does."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randn(WIDTH, WIDTH)
        scale = weight.abs().amax(1, keepdim=True) / 7
        codes = (weight / scale).round().add(8).to(torch.uint8)
        packed = PackedWeight(codes[:, ::2] * 16 + codes[:, 1::2], requires_grad=False)
        packed.scale = scale.double()
        self.weight, self.state = packed, SimpleNamespace(scale=None)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.scale is not None:
            self.state.scale, self.weight.scale = self.weight.scale, None
        codes = torch.stack([self.weight // 16, self.weight % 16], -1).flatten(1).double()
        if self.state.scale is None:
            codes = codes / 0  # the scales are lost
        return (x @ ((codes - 8) * self.state.scale).T + self.up(self.down(x))).tanh()


class LitPacked(pl.LightningModule):
    """A module of packed layers with trained adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(PackedLinear() for _ in range(4)))
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.model(batch) - batch).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def train(rank: int, path: Path, strategy: dict[str, Any] | None, resume: Path | None = None, seed: int = 3) -> Any:
    """Train for one epoch, or resume for another one, save, and return losses and weights."""
    quiet()
    pl.seed_everything(seed, verbose=False)
    lit, batches = LitPacked(), torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    trainer = make_trainer(
        devices=1 if strategy is None else 2,
        strategy="auto" if strategy is None else PipelineStrategy(**strategy),
        precision="64-true",
        max_epochs=1 if resume is None else 2,
    )
    trainer.fit(lit, DataLoader(batches, 8), ckpt_path=resume)  # type: ignore[arg-type]
    trainer.save_checkpoint(path)
    return lit.losses, plain_values(dict(lit.state_dict()))


def train_stages(rank: int, folder: Path) -> list[Any]:
    """Train and resume with whole and sharded checkpoints, and check that packed weights must be equal on all ranks."""
    found = []
    for form in ("full", "sharded"):
        settings = {"microbatches": 2, "checkpoint": form}
        found.append(train(rank, folder / form, settings))
        found.append(train(rank, folder / f"{form} 2", settings, folder / form))
    with pytest.raises(
        (PipelineError, PeerFailure), match=r"quantized or otherwise packed weights differ between ranks"
    ):
        train(rank, folder / "other", {}, seed=rank)
    return found


def test_adapters_on_packed_weights_train_and_resume_as_in_one_process(tmp_path):
    """Losses, weights and checkpoints equal the results of one process, with whole and sharded checkpoints."""
    plain = [train(0, tmp_path / "plain", None), train(0, tmp_path / "on", None, tmp_path / "plain")]
    for found in run_ranks(train_stages, 2, tmp_path, timeout=90):
        assert differences(found, [*plain, *plain], tolerance=1e-10) == []
    consolidate(tmp_path / "sharded", tmp_path / "sharded.ckpt")
    saved = [torch.load(tmp_path / name)["state_dict"] for name in ("full", "sharded.ckpt", "plain")]
    for state in saved:
        assert state["model.2.weight"].dtype == torch.uint8
        assert differences(plain_values(dict(state)), plain_values(dict(saved[-1])), tolerance=1e-10) == []


class MarkedWeight(nn.Parameter):
    """A parameter without data other than its values, of a class that selects its weight decay."""


def test_class_of_parameters_does_not_imply_packed_values():
    """A subclass of Parameter is not packed by itself; integer values or a tensor attribute make it packed."""
    values = torch.ones(2, 2)
    packed = PackedWeight(values.to(torch.uint8), requires_grad=False)
    scaled = PackedWeight(values)
    scaled.scale = values
    assert [is_packed(kind(values)) for kind in (nn.Parameter, MarkedWeight, PackedWeight)] == [False] * 3
    assert [is_packed(packed), is_packed(scaled)] == [True, True]
