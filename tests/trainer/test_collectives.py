"""Tests of collectives in the user's code.

They run over the replicas of a stage, while each stage runs a part of a step.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.nn.functional import all_reduce as all_reduce_with_gradient
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipes import PipelineStrategy
from lightning_pipes.ir import PipelineError
from lightning_pipes.testing.ranks import run_ranks, watch_ranks
from tests.trainer.lit import differences, plain_values, quiet
from tests.trainer.replicas import ROWS, SEED, Dealt
from tests.trainers import make_trainer

WIDTH = 6


def count_ranks() -> int:
    """Return the world size, or 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def reduced(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks, as in modules that run with and without DDP."""
    tensor = tensor.clone()
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


class ReducingLayer(nn.Linear):
    """A layer that subtracts the mean of all samples, and gathers this mean from all ranks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x)
        mean = reduced(y.detach().mean(0)) / count_ranks()
        if dist.is_initialized():
            parts = [torch.empty_like(mean) for _ in range(count_ranks())]
            dist.all_gather(parts, mean)
            mean = torch.stack(parts)[dist.get_rank()]
        return y - mean


class Reducing(pl.LightningModule):
    """A module that divides its loss by the boxes of all ranks, like DETR, and gathers in hooks and evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), ReducingLayer(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        )
        self.outputs: list[torch.Tensor] = []
        self.seen: list[Any] = []
        self.earlier_group: Any = None
        self.everyone: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, n = batch
        boxes = reduced(n.sum().double()) / count_ranks()
        y = self.net(x)
        boxes = 0.5 * (boxes + reduced(n.sum().double()) / count_ranks())
        if dist.is_initialized():
            dist.barrier()
            found = [0.0]
            dist.broadcast_object_list(found, src=0)
            for group in filter(None, (self.group, self.earlier_group)):
                total = n.sum().double()
                dist.all_reduce(total, group=group)
                assert total == reduced(n.sum().double())
                assert functional_collectives.all_reduce(n.sum().double(), "sum", group) == total
                parts = [torch.empty(()).double() for _ in range(dist.get_world_size(group))]
                dist.all_gather(parts, n.sum().double(), group=group)
                assert parts[dist.get_rank(group)] == n.sum()
            assert self.all_gather(n.sum().double()).sum() == total
            assert functional_collectives.all_reduce(n.sum().double(), "sum", dist.group.WORLD) == reduced(
                n.sum().double()
            )
            y = y + 0.0 * all_reduce_with_gradient(y).mean()
        return (y.pow(2).mean(1) * n).sum() / boxes.clamp(min=1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        y = self.net(batch[0])
        self.log("size", (reduced(y.mean()) / count_ranks()).abs(), sync_dist=True)
        self.outputs.append(y.detach())

    def on_validation_epoch_end(self) -> None:
        mine = torch.cat(self.outputs)
        self.outputs.clear()
        found = [mine]
        if dist.is_initialized():
            found = [torch.empty(0)] * count_ranks()
            dist.all_gather_object(found, mine)
            name = ["made by one"] if self.trainer.is_global_zero else [None]
            dist.broadcast_object_list(name, src=0)
            assert name == ["made by one"]
            number = torch.full((1,), 1.0 if self.trainer.is_global_zero else 0.0)
            dist.broadcast(number, src=0)
            assert number == 1.0
            dist.barrier()
            if self.everyone is not None:
                number = torch.ones(1)
                dist.all_reduce(number, group=self.everyone)
                assert number == dist.get_world_size(self.everyone)
        self.seen.append(torch.cat(found).sum(1).sort().values.tolist())

    def configure_optimizers(self) -> Any:
        self.seen.append(count_ranks())
        self.group = dist.new_group([*range(count_ranks())]) if dist.is_initialized() else None
        return torch.optim.SGD(self.parameters(), lr=0.1)


def samples(rows: int) -> TensorDataset:
    """Return samples with small integers as targets."""
    g = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(rows, WIDTH, generator=g).double(), torch.randint(1, 5, (rows,), generator=g))


def make_loader(rows: int, deals: bool, shuffle: bool) -> DataLoader[Any]:
    """Return a loader, whose batches contain the samples of both replicas if `deals` is set."""
    sampler = Dealt(rows, shuffle) if deals else None
    return DataLoader(samples(rows), batch_size=2 * ROWS if deals else ROWS, sampler=sampler)


def make_groups(ranks: int, replicas: int) -> tuple[Any, Any]:
    """Return two process groups made before the run: the replicas of this rank's stage, and all ranks."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    stages = ranks // replicas
    groups = [dist.new_group([*range(stage, ranks, stages)]) for stage in range(stages)]
    return groups[dist.get_rank() % stages], dist.new_group([*range(ranks)])


def fit(ranks: int, deals: bool = False, **strategy: Any) -> dict[str, Any]:
    """Train Reducing and return its weights, results and warnings."""
    quiet()
    warnings.simplefilter("always")
    pl.seed_everything(SEED, verbose=False)
    module = Reducing().double()
    if strategy:
        module.earlier_group, module.everyone = make_groups(ranks, strategy.get("data_parallel", 1))
    trainer = make_trainer(
        devices=ranks,
        strategy=PipelineStrategy(**strategy) if strategy else "auto",
        max_epochs=2,
        precision="64-true",
        num_sanity_val_steps=0,
    )
    with warnings.catch_warnings(record=True) as caught:
        trainer.fit(module, *(make_loader(rows, deals, shuffle) for rows, shuffle in ((16, True), (8, False))))
    return {
        "weights": plain_values(dict(module.state_dict())),
        "seen": module.seen,
        "size": float(trainer.callback_metrics["size"]),
        "warned": [str(each.message) for each in caught],
        "after": (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0),
    }


ONE_PIPELINE = ({"microbatches": 1}, {"microbatches": 1, "module": ""})
REPLICAS = ({"microbatches": 1, "data_parallel": 2}, {"microbatches": 2, "data_parallel": 2})


def fit_all(rank: int, ranks: int, strategies: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
    return [fit(ranks, **strategy) for strategy in strategies]


@cache
def fit_plain(deals: bool) -> dict[str, Any]:
    """Train on one process."""
    return fit(1, deals)


@pytest.mark.parametrize(("ranks", "strategies"), [(2, ONE_PIPELINE), (4, REPLICAS)], ids=["one pipeline", "replicas"])
def test_collectives_of_steps_layers_and_hooks_are_over_replicas(ranks, strategies):
    """Weights and gathered values equal one process; several micro-batches with replicas cause a warning."""
    results = run_ranks(fit_all, ranks, ranks, strategies, timeout=40)
    plain = fit_plain(deals=ranks > 2)
    for rank, found in enumerate(results):
        for strategy, each in zip(strategies, found, strict=True):
            replicas = strategy.get("data_parallel", 1)
            assert each["after"] == (ranks, rank)
            assert each["seen"][0] == replicas
            if strategy["microbatches"] > 1:
                continue
            assert differences(each["weights"], plain["weights"], at=str(strategy)) == []
            assert differences(each["seen"][1:], plain["seen"][1:], at=str(strategy)) == []
            assert differences(each["size"], plain["size"]) == []
    warned = [any("runs once for each micro-batch" in text for text in each["warned"]) for each in results[0]]
    assert warned == [each["microbatches"] > 1 and each.get("data_parallel", 1) > 1 for each in strategies]


class Asking(Reducing):
    """A module that reads the number of processes, and calls the strategy in steps and on one rank."""

    def setup(self, stage: str) -> None:
        self.share = 8 // self.trainer.world_size
        self.rate = 0.1 * self.trainer.num_devices
        self.is_alone = self.trainer.world_size > 1
        self.text = f"{self.trainer.num_devices} devices"

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        strategy = self.trainer.strategy
        strategy.barrier()
        self.seen.append((strategy.broadcast(batch_idx), strategy.reduce_boolean_decision(batch_idx == 1)))
        self.seen.append(self.all_gather(loss.detach()).shape)
        with pytest.raises(PipelineError, match=r"test_collectives.py:\d+ names rank 1, but the default process group"):
            dist.send(loss.detach(), 1)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            self.folder = self.trainer.log_dir
        dist.get_rank()

    def on_train_epoch_end(self) -> None:
        self.seen.append(self.trainer.strategy.broadcast(f"rank {self.global_rank}"))
        self.folders = [self.trainer.log_dir]

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])


class Writer(BasePredictionWriter):
    """A prediction writer that synchronizes with other writers and records the sizes instead of writing."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.written: list[int] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, *_: Any) -> None:
        dist.barrier()
        self.written.append(len(prediction))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, *_: Any) -> None:
        self.written.append(sum(map(len, predictions)))


def ask(rank: int, folder: str) -> dict[str, Any]:
    """Train and predict with Asking and return its values, folders, sizes and warnings."""
    quiet()
    module, writer = Asking().double(), Writer()
    trainer = make_trainer(
        strategy=PipelineStrategy(microbatches=1),
        max_epochs=1,
        precision="64-true",
        num_sanity_val_steps=0,
        callbacks=[writer],
        default_root_dir=folder if rank == 0 else f"{folder}/of_rank_1",
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, make_loader(8, False, False), make_loader(8, False, False))
        trainer.predict(module, make_loader(8, False, False))
    texts = [str(each.message) for each in caught]
    return {
        "seen": module.seen,
        "folders": module.folders,
        "written": writer.written,
        "counts": [text for text in texts if "the number of processes" in text],
        "ranks": [text for text in texts if "get_rank()" in text],
        "size": (trainer.strategy.data_parallel_size, trainer.strategy.data_parallel_rank),
    }


def test_numbers_of_processes_are_warned_of_and_calls_of_one_stage_end(tmp_path):
    """Each expression that reads the number of processes warns once, and calls of the strategy on one stage return."""
    ranks = run_ranks(ask, 2, str(tmp_path), timeout=40)
    # Comparisons, texts and Lightning's own code do not cause further warnings.
    (share, rate), (asked,) = ranks[0]["counts"], ranks[0]["ranks"]
    assert "test_collectives.py" in share
    assert "reads trainer.world_size, which is 2" in share
    assert "trainer.num_devices, which is 2" in rate
    assert "data_parallel_size, the number of replicas, which is 1 here" in rate
    assert "trainer.is_global_zero" in asked
    assert ranks[1]["counts"] == ranks[1]["ranks"] == []
    for found in ranks:
        assert found["folders"] == [str(tmp_path)]
        assert "rank 0" in found["seen"]
        assert found["size"] == (1, 0)
    assert (1, True) in ranks[0]["seen"]
    assert torch.Size([]) in ranks[0]["seen"]
    assert [found["written"] for found in ranks] == [[4, 4, 8], []]


class OnOneRank(Reducing):
    """A module whose hook calls a collective on global rank 0 only."""

    call = "barrier"

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            if self.call == "barrier":
                self.trainer.strategy.barrier()
            elif self.call == "broadcast":
                self.trainer.strategy.broadcast(1)
            else:
                dist.barrier()


def call_on_one_rank(rank: int, call: str) -> None:
    """Train OnOneRank with the given kind of collective."""
    quiet()
    module = OnOneRank().double()
    module.call = call
    trainer = make_trainer(strategy=PipelineStrategy(), max_epochs=1, precision="64-true", num_sanity_val_steps=0)
    trainer.fit(module, make_loader(8, False, False))


@pytest.mark.parametrize("call", ["barrier", "broadcast", pytest.param("of torch", marks=pytest.mark.slow)])
def test_a_call_on_one_rank_names_both_ends(call):
    """If only rank 0 calls a collective, the error names this call and the call for which rank 1 waits."""
    first, other = watch_ranks(call_on_one_rank, 2, call, timeout=40)
    name = "torch.distributed.barrier" if call == "of torch" else f"trainer.strategy.{call}"
    assert f"rank 0 calls {name} at {__file__}:" in first.error
    assert "rank 1 waits for a collective call of 2 ranks in StopAgreement.agree_on_stop" in first.error
    assert f"rank 0 calls {name} at {__file__}:" in other.error


class OverStages(Reducing):
    """A module whose step reduces over a group of all ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        dist.all_reduce(batch[1].sum(), group=self.everyone)
        return super().training_step(batch, batch_idx)


def reduce_over_stages(rank: int) -> None:
    quiet()
    module = OverStages().double()
    module.earlier_group, module.everyone = make_groups(2, 1)
    trainer = make_trainer(strategy=PipelineStrategy(), max_epochs=1, precision="64-true", num_sanity_val_steps=0)
    trainer.fit(module, make_loader(8, False, False))


def test_a_group_over_several_stages_is_refused_in_a_step():
    """The error names the call in the step and the ranks of its process group."""
    ends = watch_ranks(reduce_over_stages, 2, timeout=40)
    for end in ends:
        assert f"torch.distributed.allreduce at {__file__}:" in end.error
        assert "uses a process group of ranks [0, 1], which was made before the run" in end.error
