"""Tests of which ranks hold the whole module at the end of a run, and of the state that other ranks keep."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.checkpoint.files import AtomicCheckpointIO
from lightning_pipes.trainer.checkpoint.sharded import ShardedCheckpoint
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.relocation.gathering import (
    RankInventory,
    choose_receivers,
    group_tensors,
    pack_tensors,
    unpack_tensors,
)
from tests.trainer.lit import LitTied, data, differences, plain_values, quiet
from tests.trainers import make_trainer

WAYS = ("auto", "all", "rank0", "none")


class Counting(nn.Linear):
    """A layer with extra state that is not a tensor."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return super().forward(x)

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


class LitCounting(LitTied):
    """A module with tied weights, buffers that are saved and not saved, and a layer with extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.model.insert(4, Counting(6, 6))
        self.model.insert(5, nn.BatchNorm1d(5))
        for number in (0, 6):
            self.model[number].register_buffer("seen", torch.zeros(2), persistent=False)
            self.model[number].register_buffer("saved", torch.zeros(2))


def fit(module: pl.LightningModule, **strategy: Any) -> pl.Trainer:
    """Train for one epoch, on two ranks if the strategy has settings, and return the Trainer."""
    devices = 2 if strategy else 1
    trainer = make_trainer(
        devices=devices,
        strategy=PipelineStrategy("1f1b", microbatches=1, **strategy) if strategy else "auto",
        max_epochs=1,
        precision="64-true",
    )
    trainer.fit(module, DataLoader(data(tokens=True), batch_size=8))
    return trainer


def train(rank: int, piped: bool) -> dict[str, Any]:
    """Return the state of a module after a first and a second run, for each way of gathering."""
    quiet()
    found: dict[str, Any] = {}
    for way in WAYS if piped else ("all",):
        pl.seed_everything(3, verbose=False)
        module = LitCounting().double()
        before = dict(module.named_parameters())
        options = {"gather": way} if piped else {}
        for run in (1, 2):
            fit(module, **options)
            state = module.state_dict()
            here = {k: v for k, v in state.items() if not state.get(k.replace("_extra_state", "weight"), v).is_meta}
            found[f"{way} {run}"] = plain_values({k: v for k, v in here.items() if not k.endswith("_extra_state")})
            found[f"{way} {run}"] |= {k: v for k, v in here.items() if k.endswith("_extra_state")}
        found[f"{way}, same objects"] = all(p is before[n] for n, p in module.named_parameters() if not p.is_meta)
    return found


def save(rank: int, folder: str) -> None:
    """Save a checkpoint after a run, for each way of gathering and each format."""
    quiet()
    for way in (*WAYS, "trained"):
        for kind in ("full", "sharded"):
            pl.seed_everything(3, verbose=False)
            fit(LitCounting().double(), gather=way, checkpoint=kind).save_checkpoint(f"{folder}/{way}.{kind}")


@cache
def pipeline() -> list[dict[str, Any]]:
    return run_ranks(train, 2, True, timeout=300)


@cache
def plain() -> dict[str, Any]:
    return run_ranks(train, 1, False, timeout=150)[0]


@pytest.mark.parametrize("run", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_have_the_module(way: str, run: int) -> None:
    whole = plain()[f"all {run}"]
    parts = [found[f"{way} {run}"] for found in pipeline()]
    for rank, part in enumerate(parts):
        assert differences(part, {k: v for k, v in whole.items() if k in part}) == []
        assert (part.keys() == whole.keys()) == (way in ("auto", "all") or (way == "rank0" and rank == 0))
    assert {*parts[0], *parts[1]} == {*whole}


@pytest.mark.parametrize("way", WAYS)
def test_parameters_are_the_same_objects(way: str) -> None:
    assert all(found[f"{way}, same objects"] for found in pipeline())


def test_a_checkpoint_after_the_run_has_the_whole_module(tmp_path: Path) -> None:
    run_ranks(save, 2, str(tmp_path), timeout=90)
    for way in (*WAYS, "trained"):
        full = AtomicCheckpointIO().load_checkpoint(tmp_path / f"{way}.full")["state_dict"]
        sharded = dict(ShardedCheckpoint(tmp_path / f"{way}.sharded").checkpoint(None)["state_dict"])
        for state in (full, sharded):
            assert differences(plain_values(state), plain()["all 1"], at=way) == []


def side(host: str, available: int, missing: int, spread: bool = False) -> RankInventory:
    return RankInventory(host, available, missing, spread, (), {})


@pytest.mark.parametrize(
    ("gather", "sides", "receivers"),
    [
        ("auto", [side("a", 100, 20), side("a", 100, 30)], [0, 1]),
        ("auto", [side("a", 99, 20), side("a", 99, 30)], [0]),
        ("auto", [side("a", 100, 20), side("b", 10, 30)], [0]),
        ("auto", [side("a", 39, 20), side("b", 100, 30)], []),
        ("auto", [side("a", 100, 0), side("b", 100, 30, spread=True)], []),
        ("all", [side("a", 1, 20), side("a", 1, 30, spread=True)], [0, 1]),
        ("rank0", [side("a", 1, 20), side("a", 1, 30)], [0]),
        ("none", [side("a", 100, 20), side("a", 100, 30)], []),
        ("trained", [side("a", 1, 20), side("a", 1, 30)], [0]),
    ],
)
def test_by_default_as_memory_allows(gather: str, sides: list[RankInventory], receivers: list[int]) -> None:
    assert [*choose_receivers(gather, sides)] == receivers


def test_small_tensors_travel_together() -> None:
    tensors = [
        torch.arange(3, dtype=torch.float64),
        torch.tensor([True, False, True]),
        torch.tensor(7),
        torch.randn(3, 5).to(torch.bfloat16).t(),
        torch.zeros(0),
        torch.randn(1 << 19),
        torch.randn(2, dtype=torch.complex128),
    ]
    described = [(str(n), tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in enumerate(tensors)]
    groups = [*group_tensors(described)]
    assert [[name for name, *_ in group] for group in groups] == [[*"01234"], ["5"], ["6"]]
    arrived = [
        values
        for group in groups
        for values in unpack_tensors(pack_tensors([tensors[int(name)] for name, *_ in group]), group)
    ]
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(arrived, tensors, strict=True))
    # a tensor does not keep the memory of the others
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in arrived)


def count_messages(rank: int) -> int:
    """Return the number of tensors that a run of four layers broadcasts."""
    quiet()
    sent: list[int] = []
    plain = Control.broadcast_tensor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Control, "broadcast_tensor", lambda self, *args: (sent.append(1), plain(self, *args))[1])
        torch.manual_seed(0)  # rank 0 would broadcast its weights if ranks began with different weights
        fit(LitCounting().double(), gather="all")
    return len(sent)


def test_each_rank_sends_small_tensors_in_one_message() -> None:
    assert run_ranks(count_messages, 2, timeout=150) == [2, 2]
