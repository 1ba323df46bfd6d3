"""Batches of a stream run one by one while memory is short on some device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from lightning_pipes.sim.shown.training_record import Curves
from lightning_pipes.testing.ranks import run_ranks
from tests.trainer.lit import Lit, data, plain_values, quiet
from tests.trainers import make_trainer

ROWS, BATCHES, EVERY = 4, 24, 4


class Fake:
    """A monitor whose device has less and less free, and then all again; of rank 1 alone."""

    def __init__(self, rank: int) -> None:
        self.free = iter([1000, 1000, 90, 500, 500] if rank else [1000] * 5)

    def since_last(self) -> tuple[Mapping[str, float], int | None]:
        return {}, next(self.free)

    def to_curves(self) -> Curves:
        raise AssertionError("nobody asks for a report")


class Watches(pl.Callback):
    """Sets the monitor, and counts the windows that have ended before each batch ended."""

    def __init__(self) -> None:
        self.windows: list[int] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        trainer.strategy.running.statistics.monitor = Fake(trainer.global_rank)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.windows.append(len(trainer.strategy.running.windows))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        trainer.strategy.running.statistics.monitor = None


def train(rank: int, guarded: bool) -> tuple[list[int], list[str], Any]:
    quiet()
    pl.seed_everything(3, verbose=False)
    module, watches = Lit().double(), Watches()
    settings = {"every": EVERY, **({"low_memory": 100} if guarded else {})}
    trainer = make_trainer(
        strategy=PipelineStrategy("dynpipe", 1, partition=[4], schedule_args=settings),
        precision="64-true",
        max_epochs=1,
        limit_val_batches=0,
        callbacks=[watches],
    )
    with pytest.warns() as said:
        trainer.fit(module, DataLoader(data(ROWS * BATCHES), batch_size=ROWS))
    return watches.windows, [str(w.message) for w in said], plain_values(dict(module.state_dict()))


def both(rank: int) -> list[Any]:
    return [train(rank, guarded) for guarded in (True, False)]


def test_batches_run_one_by_one_while_memory_is_short() -> None:
    """Looks before batches 4, 8, 12 and 16 are answered three batches later each, when both ranks are sure to have told
    what they saw; the third one sees little on rank 1, the fourth enough."""
    ranks = run_ranks(both, 2, timeout=60)
    for (guarded, _, _), (free, _, _) in ranks:
        assert free[:-1] == [0] * (BATCHES - 1)
        short = [n for n in range(1, BATCHES - 1) if guarded[n] > guarded[n - 1]]
        assert short == [15, 16, 17, 18]  # the window is drained before each of these
    said = ranks[0][0][1]
    assert any("batches run one by one: memory is getting short" in each for each in said)
    assert any("batches overlap again: memory is free again" in each for each in said)
    assert not any("memory" in each for each in ranks[0][1][1])
