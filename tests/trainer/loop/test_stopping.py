"""Tests that all ranks stop after the same batch if one rank requests a stop."""

from __future__ import annotations

import math
import os
import signal
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback, EarlyStopping
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.loop import stopping
from tests.trainer.lit import Lit, data, quiet
from tests.trainers import make_trainer


class Wish(Callback):
    """Requests a stop on one rank after a number of steps."""

    def __init__(self, rank: int, how: str) -> None:
        self.rank, self.how = rank, how

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == 4:
            if self.how == "stop":
                trainer.should_stop = True
            if self.how == "sigterm":
                os.kill(os.getpid(), signal.SIGTERM)

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.global_rank == self.rank and self.how == "after validation" and trainer.global_step >= 3:
            trainer.should_stop = True


class Worse(EarlyStopping):
    """Stops when the validation loss stops falling, which requires the metric on every rank."""

    def __init__(self) -> None:
        super().__init__("val_loss", patience=1, min_delta=10.0)


def stop(rank: int, cases: list[tuple[int, str]]) -> list[int]:
    """Return the number of steps of each case."""
    quiet()
    steps = []
    for where, how in cases:
        pl.seed_everything(3, verbose=False)
        trainer = make_trainer(
            strategy=PipelineStrategy(microbatches=2),
            max_epochs=5,
            precision="64-true",
            callbacks=[Worse() if how == "early stopping" else Wish(where, how)],
        )
        with patch.object(stopping, "rank_zero_info") as note:
            try:
                trainer.fit(Lit(layers=3), DataLoader(data(), batch_size=8), DataLoader(data(5), batch_size=5))
            except SIGTERMException:
                assert how == "sigterm"
                note.assert_called_once_with("All ranks end after SIGTERM, at global step 4; the exit status is 143")
        steps.append(trainer.global_step)
    return steps


CASES = [(0, "stop"), (1, "stop"), (0, "sigterm"), (1, "sigterm"), (1, "after validation"), (0, "early stopping")]
EXPECTED = [4, 4, 4, 4, 3, 6]


@pytest.fixture(scope="module")
def steps() -> list[list[int]]:
    return run_ranks(stop, 2, CASES, timeout=60)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{how} on rank {rank}" for rank, how in CASES])
def test_all_ranks_stop_at_the_same_step(number, steps):
    assert [of_rank[number] for of_rank in steps] == [EXPECTED[number]] * 2


class OwnTime(Callback):
    """Lets the time of the next validation come on one rank only."""

    def __init__(self, rank: int) -> None:
        self.rank, self.validated = rank, []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == self.rank and batch_idx == 2:
            trainer._last_val_time = -math.inf

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.validated.append(trainer.global_step)


def validate_by_time(rank: int, cases: list[tuple[str, int]]) -> list[list[int]]:
    """Return the global steps of the validations of each case."""
    quiet()
    found = []
    for schedule, where in cases:
        pl.seed_everything(3, verbose=False)
        times = OwnTime(where)
        trainer = make_trainer(
            strategy=PipelineStrategy(schedule, microbatches=2),
            max_epochs=1,
            num_sanity_val_steps=0,
            val_check_interval="00:01:00:00",
            precision="64-true",
            callbacks=[times],
        )
        trainer.fit(Lit(layers=3), DataLoader(data(48), batch_size=8), DataLoader(data(5), batch_size=5))
        found.append(times.validated)
    return found


def test_ranks_validate_after_the_same_batch_by_time():
    cases = [(schedule, rank) for schedule in ("1f1b", "pipedream") for rank in (0, 1)]
    assert run_ranks(validate_by_time, 2, cases, timeout=60) == [[[3]] * 4] * 2
