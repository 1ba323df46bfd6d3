"""Tests of requirements of Lightning's own tests: checkpoint plugins, and steps without layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
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


def evaluated_on_a_rank(rank: int) -> tuple[list[Any], list[int]]:
    quiet()
    return evaluated(2)


def test_two_ranks_evaluate_as_one_process() -> None:
    quiet()
    wanted, seen = evaluated(1, "auto")
    for rank, (logged, on_rank) in enumerate(run_ranks(evaluated_on_a_rank, 2, timeout=90)):
        assert logged == [pytest.approx(each) for each in wanted]
        assert rank or on_rank == seen  # rank 0 has the last stage, which runs whole steps


def test_a_folder_takes_no_storage_options(tmp_path: Path) -> None:
    """Check that options for a plugin are refused if ranks write their parts themselves."""
    quiet()
    trainer = make_two_steps_trainer(1, PipelineStrategy(microbatches=2, checkpoint="sharded"))
    trained(trainer)
    with pytest.raises(InputError, match="can't hand storage_options to it"):
        trainer.save_checkpoint(tmp_path / "parts", storage_options={"a": 1})


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
