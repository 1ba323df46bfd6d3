"""Tests that the values that steps keep on the module equal the values in one process.

Modules are cut by layers and by units.
"""

from __future__ import annotations

import warnings
from collections import deque
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_pipes import PipelineStrategy
from lightning_pipes.testing.ranks import run_ranks, watch_ranks
from tests.trainers import make_trainer


class Keeper(pl.LightningModule):
    """A module that keeps many kinds of values in each step, some of them as long as a micro-batch."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(1)
        layers = (nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(dropout)) for _ in range(4))
        self.net = nn.Sequential(*layers)
        self.metric = MeanMetric()
        self.pairs: list[tuple[int, int]] = []
        self.nested: dict[str, list[Any]] = {}
        self.latest: deque[tuple[int, str]] = deque(maxlen=3)
        self.samples: list[float] = []
        self.shapes: list[tuple[int, ...]] = []
        self.count, self.total, self.steps = 0, 0.0, 0
        self.table = torch.zeros(2, 2)
        self.batch: torch.Tensor | None = None

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        out = self.net(x)
        self.pairs.append((batch_idx, batch_idx + 1))
        self.nested.setdefault("entries", []).append([batch_idx, "a"])
        self.latest.append((batch_idx, "b"))
        self.samples.extend(x[:, 0].tolist())
        self.shapes.append(tuple(out.shape))
        self.count += len(x)
        self.total += float(x.sum())
        self.steps += 1
        self.table = self.table + x.sum() * torch.ones(2, 2)
        self.batch = x.detach().clone()
        self.metric.update(x[:, 1])
        return F.mse_loss(out, y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def kept(self) -> dict[str, Any]:
        """Return all values that steps have kept. Tensors are converted to lists."""
        assert self.batch is not None
        names = ("pairs", "nested", "latest", "samples", "shapes", "count", "total", "steps")
        tensors = {"table": self.table, "batch": self.batch, "metric": self.metric.compute()}
        return {n: getattr(self, n) for n in names} | {n: rounded(t) for n, t in tensors.items()}


def rounded(tensor: torch.Tensor) -> Any:
    digits = 9 if tensor.dtype is torch.float64 else 5
    return torch.round(tensor.double(), decimals=digits).tolist()


def train(strategy: PipelineStrategy | None, dropout: float, kind: type[Keeper] = Keeper) -> dict[str, Any]:
    """Train for eight steps and return the kept values. Without a strategy, train in plain Lightning."""
    x = torch.randn(72, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    module, data = kind(dropout), DataLoader(TensorDataset(x, x.flip(0)), batch_size=8)
    devices: dict[str, Any] = {"devices": 1} if strategy is None else {"devices": 2, "strategy": strategy}
    make_trainer(**devices, max_steps=8, precision="64-true").fit(module, data)
    return module.kept() | {"total": round(module.total, 9)}


class NeedsGradients(Keeper):
    """Fails without gradients, as a step that computes derivatives itself."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if not torch.is_grad_enabled():
            raise ValueError("no gradients here")
        return loss


def train_without_comparison(rank: int) -> str:
    with pytest.warns(UserWarning, match="does not run on a whole batch without gradients") as caught:
        train(PipelineStrategy("1f1b", microbatches=4, module=""), 0.0, NeedsGradients)
    return next(text for each in caught if "NeedsGradients.training_step sets" in (text := str(each.message)))


def test_a_step_that_a_whole_batch_cannot_run() -> None:
    """Check that a step that fails without gradients is trained, with a warning on the logging rank only."""
    outcomes = watch_ranks(train_without_comparison, 2, timeout=300)
    assert "ValueError: no gradients here" in outcomes[0].value
    assert "DID NOT WARN" in outcomes[1].error


def train_each_way(rank: int) -> list[tuple[dict[str, Any], list[str]]]:
    found = []
    for cut, dropout in (("net", 0.0), ("", 0.0), ("", 0.5)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kept = train(PipelineStrategy("1f1b", microbatches=4, module=cut), dropout)
        found.append((kept, [text for each in caught if "self." in (text := str(each.message))]))
    return found


def test_values_of_many_kinds_that_a_step_keeps() -> None:
    """Check that kept values equal the values in one process, with and without dropout.

    With dropout, values that depend on random numbers cannot be compared, so a warning is allowed.
    """
    wanted = train(None, 0.0)
    for ways in run_ranks(train_each_way, 2, timeout=300):
        for (kept, told), numbers_differ in zip(ways, (False, False, True), strict=True):
            for name in wanted:
                assert kept[name] == wanted[name], name
            assert not told or numbers_differ
