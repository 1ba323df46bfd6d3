"""Tests of requirements of Lightning's own tests: copies of a Trainer, checkpoint plugins, and steps without layers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from lightning_pipes.ir import InputError
from lightning_pipes.testing.ranks import run_ranks
from tests.trainer.lit import Lit, data, quiet
from tests.trainers import make_trainer


def make_two_steps_trainer(devices: int, strategy: Any = None, **more: Any) -> pl.Trainer:
    """Return a Trainer that trains for two steps, with a pipeline by default."""
    return make_trainer(
        devices=devices,
        strategy=strategy or PipelineStrategy(microbatches=2, partition="parameters"),
        max_steps=2,
        precision="64-true",
        **more,
    )


def loader() -> DataLoader[Any]:
    return DataLoader(data(), batch_size=8)


def trained(trainer: pl.Trainer) -> list[torch.Tensor]:
    """Train a new module and return its weights."""
    torch.manual_seed(0)
    module = Lit()
    trainer.fit(module, loader())
    return [weight.detach().clone() for weight in module.parameters()]


def copied(trainer: pl.Trainer) -> list[torch.Tensor]:
    """Return the weights after training with a copy of a Trainer that has already trained for two steps."""
    trained(trainer)
    other = copy.deepcopy(trainer)
    other.fit_loop.epoch_loop.max_steps = 4
    return trained(other)


class Storage(TorchCheckpointIO):
    """A checkpoint plugin that records its storage options instead of saving."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.told.append(storage_options)


class SometimesLayers(Lit):
    """A module that calls its layers in validation of the first loader only, and never in testing."""

    def __init__(self) -> None:
        super().__init__()
        self.plain_batches: list[int] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        if dataloader_idx == 0:
            return super().validation_step(batch, batch_idx)
        self.plain_batches.append(batch_idx)
        self.log("plain", batch[0].sum() * (batch_idx + 1), batch_size=len(batch[0]))
        return batch[0].mean()

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test", batch[0].mean(), batch_size=len(batch[0]))
        return {"x": batch[0].sum()}


def evaluated(devices: int, strategy: Any = None) -> tuple[list[Any], list[int]]:
    """Return the results of validation and testing, and the batches of the second loader seen by this process."""
    torch.manual_seed(0)
    module = SometimesLayers()
    found: list[Any] = make_two_steps_trainer(devices, strategy).validate(module, [loader(), loader()], verbose=False)
    found += make_two_steps_trainer(devices, strategy).test(module, loader(), verbose=False)
    return found, module.plain_batches


def ranks_do(rank: int, folder: str) -> dict[str, Any]:
    """Return everything that the test compares, from one of two ranks."""
    quiet()
    found: dict[str, Any] = {"evaluated": evaluated(2), "copied": copied(make_two_steps_trainer(2))}
    storage = Storage()
    trainer = make_two_steps_trainer(2, PipelineStrategy(microbatches=2, checkpoint_io=storage))
    trained(trainer)
    trainer.save_checkpoint(f"{folder}/never", storage_options={"a": 1})
    found["told"] = storage.told
    trainer = make_two_steps_trainer(2, PipelineStrategy(microbatches=2, checkpoint="sharded"))
    trained(trainer)
    try:
        trainer.save_checkpoint(f"{folder}/parts", storage_options={"a": 1})
    except InputError as error:
        found["refused"] = str(error)
    return found


def test_two_ranks_do_what_one_process_does(tmp_path: Path) -> None:
    """Two ranks evaluate, copy the Trainer and pass on storage options as one process does."""
    quiet()
    wanted, seen = evaluated(1, "auto")
    weights = copied(make_two_steps_trainer(1, "auto"))
    for rank, found in enumerate(run_ranks(ranks_do, 2, str(tmp_path), timeout=90)):
        logged, on_rank = found["evaluated"]
        assert [set(each) for each in logged] == [set(each) for each in wanted]
        for ours, theirs in zip(logged, wanted, strict=True):
            assert ours == pytest.approx(theirs)
        if rank == 0:  # the rank of the last stage, which runs whole steps
            assert on_rank == seen
        torch.testing.assert_close(found["copied"], weights)
        assert found["told"] == ([{"a": 1}] if rank == 0 else [])
        assert "can't hand storage_options to it" in found["refused"]


def test_one_device_runs_each_step_once() -> None:
    """A pipeline on one device runs each validation step exactly as often as Lightning without a pipeline."""
    quiet()
    assert evaluated(1)[1] == evaluated(1, "auto")[1]


def test_a_patched_save_is_the_one_that_writes(tmp_path: Path) -> None:
    """Checkpoints are written by `torch.save` as it is at this time, so a replacement of the function takes effect."""
    quiet()
    trainer = make_two_steps_trainer(1)
    trained(trainer)
    written = []

    def other_form(thing: Any, file: Any) -> None:
        written.append(thing)
        file.write(b"of a form of its own")

    with mock.patch("torch.save", other_form):
        trainer.save_checkpoint(tmp_path / "own.ckpt")
    assert (tmp_path / "own.ckpt").read_bytes() == b"of a form of its own"
    assert len(written) == 1
