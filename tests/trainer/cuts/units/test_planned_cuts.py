"""Tests of modules that are cut by units, whose stages cut a batch as a planner chooses from the times of their units.

The times are those of a virtual clock, so the choice is always the same.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipes import PipelineStrategy
from lightning_pipes.ir import Kind
from lightning_pipes.testing.ranks import run_ranks
from tests.trainer.lit import differences, plain_values, quiet
from tests.trainers import make_trainer
from tests.virtual_clock import VirtualClock

RANKS, ROWS, REST, WIDTH = 3, 24, 13, 6
_time = VirtualClock()


class Pause(torch.autograd.Function):
    """Returns its input. It takes the given seconds on the virtual clock in forward, and twice as many in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        _time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Paced(nn.Linear):
    """A layer that takes the same time for any number of samples, or a time for each sample."""

    def __init__(self, seconds: float, of_sample: float) -> None:
        super().__init__(WIDTH, WIDTH)
        self.seconds, self.of_sample = seconds, of_sample

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        seconds = self.seconds + self.of_sample * len(input)
        return Pause.apply(super().forward(input), seconds).tanh()  # type: ignore[no-any-return,no-untyped-call]


class Skips(pl.LightningModule):
    """A module without a container. Its first layers are best called seldom, and the others with few samples."""

    def __init__(self) -> None:
        super().__init__()
        for n in range(6):
            setattr(self, f"layer{n}", Paced(0.004, 0.0) if n < 3 else Paced(0.0, 0.001))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = x = self.layer0(x)
        for n in range(1, 6):
            x = getattr(self, f"layer{n}")(x)
        return x + skip  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = 2 * F.mse_loss(self(batch[0]), batch[1]) + 1  # the loss is followed by units that have no samples
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class HoldsMean(Skips):
    """A module with a mean over samples that crosses all borders."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        mean = self.layer0(batch[0]).mean()
        return super().training_step(batch, batch_idx) + mean


class Counts(pl.Callback):
    """Records the numbers of micro-batches of the stages, forward and backward, by the number of samples."""

    def __init__(self) -> None:
        self.found: dict[int, set[int]] = {}

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        plan = trainer.strategy.current_run.engine.plan
        stages = [(kind, stage) for kind in (Kind.F, Kind.B) for stage in range(plan.n_stages)]
        self.found[plan.jobs[0].rows] = {len(plan.spans(*each)) for each in stages}


CASES: list[tuple[type[Skips], dict[str, Any], bool, list[int]]] = [
    (Skips, {"schedule": "umpipe"}, True, [4, 5]),
    (Skips, {"schedule": "auto"}, True, [1, 2, 3, 4, 5]),  # two stages on each rank
    (HoldsMean, {"schedule": "umpipe"}, False, [4, 5]),
    (HoldsMean, {"schedule": "auto"}, False, [0, 1, 2, 3, 4, 5]),  # three stages on each rank
]
"""Modules, settings of the strategy, whether stages cut a batch differently, and the layers at which they begin.

The last two stages of the last case begin behind the layers, and the second one at the second call of the first layer.
"""


def fit(kind: type[Skips], strategy: Any, devices: int) -> tuple[dict[str, Any], dict[int, set[int]]]:
    """Train, and return the weights and metrics, and the numbers of micro-batches."""
    torch.manual_seed(0)
    module, counts = kind().double(), Counts()
    x = torch.randn(2 * ROWS + REST, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    callbacks = [counts] if devices > 1 else []
    trainer = make_trainer(devices=devices, strategy=strategy, max_epochs=2, callbacks=callbacks)
    trainer.fit(module, DataLoader(TensorDataset(x, x.sin()), batch_size=ROWS))
    return plain_values({**module.state_dict(), **trainer.callback_metrics}), counts.found


def fit_all(rank: int, folder: Path) -> list[tuple[dict[str, Any], dict[int, set[int]], str, dict[str, int]]]:
    """Train all cases, and return their results with the text of the log, and the last stage of each unit by name."""
    quiet()
    found = []
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    for name, level in (("lightning_pipes", "DEBUG"), ("lightning.pytorch.utilities.rank_zero", "INFO")):
        logging.getLogger(name).setLevel(level)
        logging.getLogger(name).addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        _time.patch(patch)
        for kind, settings, *_ in CASES:
            lines.clear()
            strategy, file = PipelineStrategy(**settings), folder / f"{rank}.json"
            values, counts = fit(kind, strategy, RANKS)
            strategy.decision.save_pieces(str(file))
            stages = {piece["name"]: piece["stage"] for piece in json.loads(file.read_text())}
            found.append((values, counts, "\n".join(lines), stages))
    return found


def test_stages_cut_a_batch_as_planned(tmp_path: Path) -> None:
    """Check the results, the numbers of micro-batches, and that messages and reports have the cut that runs."""
    expected = {kind: fit(kind, "auto", 1)[0] for kind in (Skips, HoldsMean)}
    for rank, found in enumerate(run_ranks(fit_all, RANKS, tmp_path, timeout=400)):
        for (kind, settings, is_unequal, borders), (values, counts, lines, of_units) in zip(CASES, found, strict=True):
            where = f"{kind.__name__}, {settings['schedule']}, rank {rank}"
            assert differences(expected[kind], values, 1e-10, where) == []
            assert {*counts} == {ROWS, REST}, where
            assert (len(counts[ROWS]) > 1) == is_unequal, (where, counts)
            assert ("cut a batch equally: Stage" in lines and "from 'mean'" in lines) != is_unequal, where
            assert [of_units[f"layer{n}"] for n in borders] == [*range(1, len(borders) + 1)], (where, of_units)
            names = ", ".join(f"'layer{n}'" for n in borders)
            assert rank > 0 or f"Stages after the first begin at {names}" in lines, (where, lines)
