"""Tests of pipeline replicas, which average gradients, shard data and reduce logs, against one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from lightning_pipes.ir import PlanError
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.ranks.ranks import Grid
from tests.cases import selected_values
from tests.trainer.lit import Keeper, Lit, LitOutside, LitUnfrozen, MeanOfAll, data, differences, plain_values, quiet
from tests.trainer.replicas import REPLICAS, ROWS, SEED, Dealt
from tests.trainers import make_trainer


class LitSynced(LitOutside):
    """A module that logs with `sync_dist` and with a metric, as DDP needs it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.right = MeanOfAll()
        self.gathered: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        losses = F.cross_entropy(self(x), y, reduction="none")
        self.right(losses)
        self.log("val_metric", self.right)
        self.log("val_loss", losses.mean(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        pass


class LitSometimes(LitSynced):
    """A module with a layer that only some samples reach, so a replica may have no gradient for it."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.extra = nn.Linear(3, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        chosen = x[:, 0] > 1.0
        return out + self.extra(out * chosen[:, None]) if chosen.any() else out


class LitUnfrozenSynced(LitSynced, LitUnfrozen):
    pass


SAMPLES, VALIDATED = 24, 16
CASES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "kfkb": {"strategy": {"schedule": "kfkb", "schedule_args": {"k": 2}}},
    "zero_bubble": {"strategy": {"schedule": "zero_bubble"}},
    "interleaved": {"strategy": {"schedule": "interleaved", "schedule_args": {"stages_per_rank": 2}}},
    "clipped, accumulated": {"trainer": {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}},
    "no gradient on one replica": {"module": LitSometimes},
    "frozen at first": {"module": LitUnfrozenSynced},
    "stopped early": {
        "trainer": {"max_epochs": 6, "callbacks": lambda: [EarlyStopping("val_loss", patience=1, min_delta=10.0)]}
    },
}


def train(rank: int, case: dict[str, Any], folder: str, pipeline: bool) -> dict[str, Any]:
    """Train a case on one rank and return its gradients, weights, metrics and counts."""
    quiet()
    pl.seed_everything(SEED, verbose=False)
    module = case.get("module", LitSynced)().double()
    keeper = Keeper()
    more = dict(case.get("trainer", {}))
    strategy = {"microbatches": 2, **case.get("strategy", {})}
    trainer = make_trainer(
        devices=4 if pipeline else 1,
        strategy=PipelineStrategy(data_parallel=REPLICAS, **strategy) if pipeline else "auto",
        precision="64-true",
        num_sanity_val_steps=0,
        callbacks=[keeper, *more.pop("callbacks", list)()],
        **{"max_epochs": 2, **more},
    )
    rows = ROWS if pipeline else ROWS * REPLICAS
    samplers = [None, None] if pipeline else [Dealt(SAMPLES, shuffle=True), Dealt(VALIDATED, shuffle=False)]
    train_loader, val_loader = (
        DataLoader(data(samples), batch_size=rows, sampler=sampler)
        for samples, sampler in zip((SAMPLES, VALIDATED), samplers, strict=True)
    )
    trainer.fit(module, train_loader, val_loader)
    trainer.save_checkpoint(Path(folder, "whole.ckpt"))
    return {
        "gradients": keeper.gradients,
        "weights": plain_values(dict(module.state_dict())),
        "metrics": plain_values(dict(trainer.callback_metrics)),
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "sampler": type(trainer.train_dataloader.sampler).__name__,
    }


def train_all(rank: int, names: list[str], folder: str) -> list[dict[str, Any]]:
    """Train the named cases in the same processes."""
    return [train(rank, CASES[name], folder, True) for name in names]


@cache
def in_replicas() -> dict[str, list[dict[str, Any]]]:
    """Return the results of all ranks for each selected case."""
    names = selected_values(test_two_pipelines_of_two_stages_are_one_process_with_twice_the_batch, "name")
    by_rank = run_ranks(train_all, 4, names, mkdtemp(), timeout=60)
    return {name: [found[n] for found in by_rank] for n, name in enumerate(names)}


@pytest.mark.parametrize("name", CASES)
def test_two_pipelines_of_two_stages_are_one_process_with_twice_the_batch(name):
    """Two pipelines of two stages have the gradients, weights and metrics of one process with twice the batch size."""
    ranks, plain = in_replicas()[name], train(0, CASES[name], mkdtemp(), False)
    for found in ranks:
        assert found["sampler"] == "DistributedSampler"
        for what in ("weights", "metrics", "steps", "epochs"):
            assert differences(found[what], plain[what], at=what) == []
        for mine, whole in zip(found["gradients"], plain["gradients"], strict=True):
            assert mine.keys() <= whole.keys()
            assert differences(mine, {n: whole[n] for n in mine}) == []
    for step, whole in enumerate(plain["gradients"]):
        assert set().union(*(found["gradients"][step] for found in ranks)) == set(whole)


class LitNormed(Lit):
    """A module with batch normalization, dropout and a constant buffer."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 3)
        )
        self.register_buffer("table", torch.arange(4) > 1)


def normed(rank: int) -> dict[str, Any]:
    """Train LitNormed and return its batches, buffers, weights, mesh and predictions on this rank."""
    quiet()
    pl.seed_everything(3, verbose=False)
    module = LitNormed().double()
    seen: list[Any] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append(plain_values(batch[0]))

    trainer = make_trainer(
        devices=4,
        strategy=PipelineStrategy("1f1b", data_parallel=2, microbatches=1),
        max_epochs=2,
        precision="64-true",
        callbacks=[Watch()],
    )
    trainer.fit(module, DataLoader(data(24), batch_size=4, shuffle=True), DataLoader(data(8), batch_size=4))
    gathered = trainer.strategy.all_gather(torch.tensor([float(rank)]))
    mesh = module.device_mesh
    return {
        "seen": seen,
        "buffers": plain_values(dict(module.named_buffers())),
        "weights": plain_values(dict(module.named_parameters())),
        "gathered": gathered.flatten().tolist(),
        "mesh": (mesh.mesh_dim_names, mesh.mesh.tolist(), mesh.get_coordinate()),
        "predicted": plain_values(trainer.predict(module, DataLoader(data(8), batch_size=2))),
    }


def test_shards_buffers_and_mesh():
    """Checks the batches, buffers, weights and device meshes of two pipelines of two stages.

    The stages of one pipeline see the same batches, the two pipelines see all samples once, and buffers and weights are
    equal on all ranks.
    """
    ranks = run_ranks(normed, 4, timeout=60)
    assert differences(ranks[0]["seen"], ranks[1]["seen"]) == []  # the stages of one pipeline
    assert differences(ranks[2]["seen"], ranks[3]["seen"]) == []
    first, second = ranks[0]["seen"][:3], ranks[2]["seen"][:3]
    together = sorted(tuple(row) for batch in (*first, *second) for row in batch)
    assert together == sorted(tuple(row.tolist()) for row in data(24).tensors[0])
    assert [found["gathered"] for found in ranks] == [[0.0, 2.0], [1.0, 3.0], [0.0, 2.0], [1.0, 3.0]]
    assert ranks[3]["mesh"] == (("data_parallel", "pipeline", "tensor_parallel"), [[[0], [1]], [[2], [3]]], (1, 1, 0))
    for found in ranks[1:]:
        assert differences(found["weights"], ranks[0]["weights"], tolerance=0.0) == []
        assert differences(found["buffers"], ranks[0]["buffers"], tolerance=0.0) == []
    assert ranks[0]["buffers"]["model.1.num_batches_tracked"] == 2 * 24 // 2 // 4
    assert differences(ranks[2]["predicted"], ranks[0]["predicted"]) != []


def wrong_number(rank: int) -> str:
    """Return the error message of a run whose number of processes is not a multiple of `data_parallel`."""
    quiet()
    trainer = make_trainer(devices=3, strategy=PipelineStrategy(data_parallel=2))
    with pytest.raises(PlanError) as error:
        trainer.fit(Lit(), DataLoader(data(), batch_size=8))
    return str(error.value)


def test_processes_that_cannot_be_shared_out():
    assert (
        "3 processes can't be divided among data_parallel=2 pipelines. Use a multiple of 2"
        in run_ranks(wrong_number, 3, timeout=30)[0]
    )
    with pytest.raises(PlanError, match="data_parallel must be at least 1, got 0"):
        PipelineStrategy(data_parallel=0)


def test_grid():
    """Checks the positions of ranks in a grid of replicas, stages and shards against values worked out by hand."""
    grid = Grid(replicas=3, size=6, rank=3)
    assert (grid.length, grid.replica, grid.position, grid.pipeline) == (2, 1, 1, (2, 3))
    assert grid.on_all_replicas((0,)) == (0, 2, 4)
    assert grid.on_all_replicas((0, 1)) == (0, 1, 2, 3, 4, 5)
    assert grid.is_in_first_pipeline is False
    grid = Grid(replicas=2, size=8, rank=7, shards=2)
    assert (grid.shape, grid.replica, grid.position, grid.shard, grid.pipeline) == ((2, 2, 2), 1, 1, 1, (5, 7))
    assert grid.pipelines == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert (grid.on_all_replicas((0,)), grid.on_all_replicas((0, 1), 0)) == ((1, 5), (0, 2, 4, 6))
