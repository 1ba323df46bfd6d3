"""Tests of optimizer states sharded over the replicas of a stage.

Training, checkpoints and resumed runs are compared with one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy, consolidate
from lightning_pipes.ir import InputError, PipelineError, PlanError
from lightning_pipes.planning.partition import with_layer
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.optimizers.optimizer_shards import check_shardable
from tests.trainer.lit import Lit, LitOutside, data, differences, plain_values, quiet
from tests.trainer.replicas import REPLICAS, ROWS, Dealt
from tests.trainers import make_trainer

SAMPLES = 22  # the last batch of an epoch has 3 samples per replica, the others have 4
EPOCHS = 10  # two optimizer steps each
CASES = {"full": ("adamw", "full"), "parts": ("adamw", "sharded"), "moved": ("sgd", "full"), "sum": ("adagrad", "full")}
"""The optimizer and the form of the checkpoint, by the name of the checkpoint."""


class LitUneven(LitOutside):
    """A module with a parameter of one element, a parameter without axes, a tied parameter and frozen parameters."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer=optimizer)
        self.scale, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(()))
        self.model[6][0].weight = self.model[0][0].weight
        self.model[2].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (self.scale + self.shift)

    def configure_optimizers(self) -> Any:
        if self.hparams.optimizer == "adagrad":  # Adagrad creates its states before the first step
            return torch.optim.Adagrad(self.parameters(), lr=0.05)
        return super().configure_optimizers()


class MoveLayer(pl.Callback):
    """A callback that moves the first layer of the last stage, with its optimizer states, to the first stage once."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        plan, _ = trainer.strategy.current_run.plans.for_rows(ROWS)
        if trainer.global_step == 2 and plan.layers[1].start == 4:
            trainer.strategy.adopt("1f1b", 2, with_layer(plan, 4, plan.ranks[0]))


class CountStates(pl.Callback):
    """A callback that counts the elements of the optimizer states on this rank at the end of training."""

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        kept = [t for state in trainer.optimizers[0].state.values() for t in state.values()]
        self.elements = sum(t.numel() for t in kept if isinstance(t, torch.Tensor) and t.dim())


def train(
    path: Path, optimizer: str = "adamw", strategy: Any = "auto", devices: int = 1, resume: Path | None = None
) -> dict[str, Any]:
    """Train with gradient clipping and accumulation, and save a checkpoint. A resumed run trains for one more epoch."""
    quiet()
    pl.seed_everything(3, verbose=False)
    module, count, dataset = LitUneven(optimizer).double(), CountStates(), data(SAMPLES)
    trainer = make_trainer(
        devices=devices,
        strategy=strategy,
        precision="64-true",
        max_epochs=EPOCHS if resume is None else EPOCHS + 1,
        gradient_clip_val=0.05,
        accumulate_grad_batches=2,
        callbacks=[count, *([MoveLayer()] if path.name == "moved" else [])],
    )
    replicas = REPLICAS if devices == 4 else 1
    sampler = None if replicas == REPLICAS else Dealt(SAMPLES, shuffle=True)
    trainer.fit(module, DataLoader(dataset, ROWS * REPLICAS // replicas, sampler=sampler), ckpt_path=resume)
    trainer.save_checkpoint(path)
    return {"weights": plain_values(dict(module.state_dict())), "states": count.elements}


def train_sharded(rank: int, folder: str) -> dict[str, Any]:
    """Train all cases with sharded states on four ranks, and resume from a sharded and from a plain checkpoint."""
    found = {}
    for name, (optimizer, form) in CASES.items():
        settings: dict[str, Any] = {"partition": [4], "checkpoint": form}
        strategy = PipelineStrategy(microbatches=2, data_parallel=REPLICAS, shard_optimizer=True, **settings)
        found[name] = train(Path(folder, name), optimizer, strategy, 4)
    for name in ("parts", "plain adamw"):
        strategy = PipelineStrategy(microbatches=2, data_parallel=REPLICAS, shard_optimizer=True)
        found[f"{name}, resumed"] = train(Path(folder, "on"), "adamw", strategy, 4, Path(folder, name))
    return found


def resume_whole(rank: int, folder: str) -> dict[str, Any]:
    """Resume on two ranks, without replicas, from a checkpoint of sharded states."""
    return train(Path(folder, "on"), "adamw", PipelineStrategy(microbatches=2), 2, Path(folder, "full"))


def states_of(path: Path) -> Any:
    """Return the optimizer states in a checkpoint, which contain whole parameters."""
    return plain_values(torch.load(path, weights_only=False)["optimizer_states"][0]["state"])


def test_two_stages_of_two_sharded_replicas_are_one_process(tmp_path):
    """Weights, saved states and resumed runs equal one process, and each replica keeps about half of the states."""
    whole = {name: train(tmp_path / f"plain {name}", name) for name in ("adamw", "sgd", "adagrad")}
    ranks = run_ranks(train_sharded, 4, str(tmp_path), timeout=120)
    consolidate(tmp_path / "parts", tmp_path / "one file", weights_only=False)
    for name, (optimizer, _) in CASES.items():
        for found in ranks:
            assert differences(found[name]["weights"], whole[optimizer]["weights"], tolerance=1e-10) == []
        written = states_of(tmp_path / ("one file" if name == "parts" else name))
        assert differences(written, states_of(tmp_path / f"plain {optimizer}"), tolerance=1e-10) == []
        stages = [ranks[position][name]["states"] + ranks[position + 2][name]["states"] for position in (0, 1)]
        for found, of_stage in zip(ranks, stages * 2, strict=True):
            assert 0.45 < found[name]["states"] / of_stage < 0.55
        assert sum(stages) >= whole[optimizer]["states"]  # tied and outside parameters have states on both stages
    further = train(tmp_path / "on", "adamw", resume=tmp_path / "plain adamw")["weights"]
    assert differences(further, whole["adamw"]["weights"], tolerance=1e-6) != []
    resumed = [found[f"{name}, resumed"] for name in ("parts", "plain adamw") for found in ranks]
    resumed += run_ranks(resume_whole, 2, str(tmp_path), timeout=60)
    resumed += [train(tmp_path / "on", "adamw", resume=tmp_path / name) for name in ("full", "one file")]
    for found in resumed:
        assert differences(found["weights"], further, tolerance=1e-10) == []


class Layerwise(torch.optim.SGD):
    """An optimizer whose step depends on the norm of a whole gradient, like LARS and LAMB."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= group["lr"] * p.grad / p.grad.norm()


def test_optimizers_are_distinguished_by_their_effect():
    """Optimizers that step each element independently are accepted; optimizers that need whole tensors are refused."""
    weights = [nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(7)), nn.Parameter(torch.zeros(()))]
    device = torch.device("cpu")
    for kind in (torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.Adadelta):
        check_shardable([kind(weights)], device)
    assert not any(p.grad is not None for p in weights)
    for optimizer in (Layerwise(weights, 0.1), torch.optim.Adafactor(weights[:1]), torch.optim.Muon(weights[:1])):
        with pytest.raises(PipelineError, match=f"{type(optimizer).__name__}, group 0, can't be sharded .* AdamW"):
            check_shardable([optimizer], device)


def test_bad_input():
    with pytest.raises(InputError, match="data_parallel=1 has one; set data_parallel to 2 or more"):
        PipelineStrategy(shard_optimizer=True)
    with pytest.raises(InputError, match="relocation='buffered' makes ranks step layers that are in transit"):
        PipelineStrategy(shard_optimizer=True, data_parallel=2, relocation="buffered")
    for refused in run_ranks(refusals, 2, timeout=60):
        assert "schedule 'pipedream' steps stages apart" in refused


def refusals(rank: int) -> str:
    """Return the error message of sharding optimizer states with a schedule that steps stages separately."""
    quiet()
    strategy = PipelineStrategy("pipedream", data_parallel=2, shard_optimizer=True)
    with pytest.raises(PlanError) as error:
        make_trainer(strategy=strategy, max_epochs=1).fit(Lit(), DataLoader(data(), 8))
    return str(error.value)
