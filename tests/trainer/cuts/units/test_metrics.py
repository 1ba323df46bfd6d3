"""Metrics in steps that are cut by units, on ranks that run the step several times on a micro-batch."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection, SumMetric

from lightning_pipes import PipelineStrategy
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.cuts.units.borders import Borders
from lightning_pipes.trainer.cuts.units.recording import record_step
from tests.trainer.lit import MeanOfAll, differences, quiet
from tests.trainers import make_trainer

WIDTH, ROWS = 6, 24


class SumInPlace(Metric):
    """A metric with one state that updates replace, and one that they change in place."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: torch.Tensor) -> None:
        self.total = self.total + values.sum()
        self.count += values.numel()

    def compute(self) -> torch.Tensor:
        return self.total + 100 * self.count


def make_metrics() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "sum": SumInPlace(),
            "cat": CatMetric(),
            "mean": MeanMetric(),
            "all": MeanOfAll(),
            "collection": MetricCollection([MaxMetric(), SumMetric()]),
        }
    ).double()


class LitMeasured(pl.LightningModule):
    """A module whose step gives the activations behind its first layer to metrics.

    Args:
        calls: whether the step calls the metrics, which also computes the value of the batch. Otherwise, it updates
            them.
    """

    def __init__(self, calls: bool) -> None:
        super().__init__()
        self.calls = calls
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.metrics = nn.ModuleDict({"fit": make_metrics(), "val": make_metrics()})

    def run(self, batch: list[torch.Tensor], name: str) -> torch.Tensor:
        x, metrics = batch[0], self.metrics[name]
        for n, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if n == 0:
                for metric in metrics.values():
                    (metric if self.calls else metric.update)(x.detach() ** 2)
        for key in ("sum", "mean", "all"):
            self.log(f"{name} {key}", metrics[key], on_step=False, on_epoch=True)
        for key, metric in metrics["collection"].items():
            self.log(f"{name} {key}", metric, on_step=False, on_epoch=True)
        return x.square().mean()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.run(batch, "fit")

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.run(batch, "val")

    def log_cat(self, name: str) -> None:
        values = self.metrics[name]["cat"].compute()
        self.log(f"{name} cat", values.sum().double())
        self.log(f"{name} numbers", float(values.numel()))
        self.metrics[name]["cat"].reset()

    def on_train_epoch_end(self) -> None:
        self.log_cat("fit")

    def on_validation_epoch_end(self) -> None:
        self.log_cat("val")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


FOUR = ["layers.1", "layers.2", "layers.3"]
SETTINGS: dict[str, dict[str, Any]] = {
    "recomputed": {"schedule": "1f1b", "partition": ["layers.2"], "recompute": True},
    "split backward, recomputed": {"schedule": "zero_bubble", "partition": ["layers.1"], "recompute": "late"},
    "two stages of a rank": {"schedule": "interleaved", "partition": FOUR},
    "two stages of a rank, recomputed": {"schedule": "interleaved", "partition": FOUR, "recompute": True},
    "neighboring stages of a rank": {"schedule": "v", "partition": FOUR, "recompute": True},
    "cut by time": {"schedule": "v"},  # most of the time belongs to the metrics
}


def logged(calls: bool, settings: dict[str, Any]) -> dict[str, float]:
    """Return the metrics that a training logs, in one process if there are no settings."""
    quiet()
    torch.manual_seed(0)
    strategy = PipelineStrategy(module="", microbatches=4, **settings) if settings else "auto"
    samples = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    loaders = [DataLoader(TensorDataset(samples[n:]), batch_size=8) for n in (0, 2)]
    trainer = make_trainer(
        devices=2 if settings else 1, strategy=strategy, max_epochs=2, precision="64-true", num_sanity_val_steps=0
    )
    trainer.fit(LitMeasured(calls).double(), *loaders)
    return {key: float(value) for key, value in trainer.callback_metrics.items()}


def log_all(rank: int) -> dict[tuple[str, bool], dict[str, float]]:
    return {(name, calls): logged(calls, SETTINGS[name]) for name in SETTINGS for calls in (True, False)}


def test_metrics_of_activations_are_those_of_one_process() -> None:
    """Each sample counts once, in training and validation, for metrics with sums, lists and shared states."""
    expected = {calls: logged(calls, {}) for calls in (True, False)}
    assert len(expected[True]) == 14
    for found in run_ranks(log_all, 2, timeout=240):
        for (name, calls), values in found.items():
            assert differences(values, expected[calls], tolerance=1e-5, at=f"{name}, {calls}") == []


def test_borders_do_not_divide_a_call_of_a_metric() -> None:
    """A metric that is called contains only the state of this call until the call ends."""
    model = nn.ModuleDict({"first": nn.Linear(WIDTH, WIDTH), "metric": MeanOfAll(), "last": nn.Linear(WIDTH, 1)})

    def step(batch: torch.Tensor) -> torch.Tensor:
        h = model["first"](batch)
        model["metric"](h.detach())
        loss: torch.Tensor = model["last"](h).sum()
        return loss

    batch = torch.randn(4, WIDTH)
    found = record_step(model, lambda run: run(), step, lambda: batch, (), torch.device("cpu"), None)
    ((start, end),) = found.metric_calls
    possible = [n for n in range(1, len(found.units)) if Borders(found).is_possible(n)]
    assert end - start > 3
    assert end in possible
    assert not {*range(start + 1, end)} & {*possible}
