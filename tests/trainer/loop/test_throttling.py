"""Tests that batches run one at a time while memory is short, and that layers leave a device if this lasts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from lightning_pipes.cost import LayerProfile, ModelProfile
from lightning_pipes.sim.records.training_record import Curves
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.plan.layer_profiler import LayerProfiler
from lightning_pipes.trainer.plan.trial import Trials
from tests.trainer.lit import Lit, as_predicted, data, quiet
from tests.trainers import make_trainer

ROWS, BATCHES, EVERY = 4, 24, 4


LACKS = {"briefly": range(8, 12), "for long": range(8, BATCHES)}
"""Batches before which rank 1, which has the first stage, has little free memory."""


class Fake:
    """A monitor of a device that has little free memory before some batches."""

    def __init__(self, lacks: Sequence[int]) -> None:
        self._lacks, self._batch = lacks, -1

    def free_bytes(self) -> int | None:
        self._batch += 1
        return 90 if self._batch in self._lacks else 10**6

    def since_last(self) -> tuple[Mapping[str, float], int | None]:
        return {}, 10**6

    def to_curves(self) -> Curves:
        raise AssertionError("no report is requested")


class Watches(pl.Callback):
    """Sets the monitor, and records the number of finished windows and the layers of each stage after each batch."""

    def __init__(self, lacks: Sequence[int]) -> None:
        self.windows: list[int] = []
        self.layers: list[list[int]] = []
        self.timed: Mapping[int, float] = {}
        self._lacks = lacks

    def on_train_start(self, trainer: Any, module: Any) -> None:
        trainer.strategy.current_run.statistics.monitor = Fake(self._lacks if trainer.global_rank else ())

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.windows.append(len(trainer.strategy.current_run.windows))
        statistics, plan = trainer.strategy.current_run.statistics, trainer.strategy.current_run.engine.plan
        self.timed = next((look.layers for look in statistics.recall_plan(plan)), self.timed)
        self.layers.append([span.rows for span in trainer.strategy.current_run.local_layers.holdings.layers])

    def on_train_end(self, trainer: Any, module: Any) -> None:
        trainer.strategy.current_run.statistics.monitor = None


def faked(self: Any, *_: Any) -> ModelProfile:
    """Return a profile of equal layers instead of measuring one."""
    layer = LayerProfile("", ((1, 1.0),), ((1, 2.0),), weight_bytes=100, output=((1, 64.0),))
    return ModelProfile((layer,) * 9)


def train(rank: int, lacks: str) -> tuple[list[int], list[list[int]], list[str], Mapping[int, float]]:
    """Train and return the windows, the layers of stages, the warnings, and the measured seconds of layers."""
    quiet()
    pl.seed_everything(3, verbose=False)
    module, watches = Lit().double(), Watches(LACKS.get(lacks, LACKS["for long"]))
    settings = {"every": EVERY, "gain": 0.9, **({"low_memory": 100} if lacks in LACKS else {})}
    trainer = make_trainer(
        strategy=PipelineStrategy("dynpipe", 1, schedule_args=settings),
        precision="64-true",
        max_epochs=1,
        limit_val_batches=0,
        callbacks=[watches],
    )
    with pytest.warns() as said:
        trainer.fit(module, DataLoader(data(ROWS * BATCHES), batch_size=ROWS))
    return watches.windows, watches.layers, [str(w.message) for w in said], dict(watches.timed)


def all_three(rank: int) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerProfiler, "profile", faked)
        patch.setattr(Trials, "run", as_predicted)
        return [train(rank, lacks) for lacks in (*LACKS, "unguarded")]


def test_batches_run_one_by_one_while_memory_is_short_and_then_layers_leave() -> None:
    """Check the batches that run one at a time, and the batch after which layers leave, against the given shortage.

    The free memory before a batch takes effect three batches later, when both ranks are sure to have reported it.
    Layers leave if memory then stays short although batches run one at a time.
    """
    ranks = run_ranks(all_three, 2, timeout=60)
    for (brief, same, _, _), (_, moved, _, _), (free, unguarded, _, timed) in ranks:
        assert sorted(timed) == [*range(9)], "each rank knows the seconds of all layers"
        assert min(timed.values()) > 0
        assert free[:-1] == [0] * (BATCHES - 1)
        short = [n for n in range(1, BATCHES - 1) if brief[n] > brief[n - 1]]
        assert short == [11, 12, 13, 14]  # the window is drained before each of these batches
        assert same == unguarded == [same[0]] * BATCHES
        first = next(n for n, layers in enumerate(moved) if layers != same[0])
        assert 11 + 5 <= first <= 11 + 7
        assert moved[-1][0] < same[0][0]
    said = ranks[0][0][2]
    assert any("so batches run one by one" in each for each in said)
    assert any("memory is free again" in each and "batches overlap again" in each for each in said)
    assert not any("memory" in each for each in ranks[0][2][2])
