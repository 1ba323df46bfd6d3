"""Tests of schedule "v" in real runs, by layers and by units: it is planned from measured times and bytes.

The times are those of a virtual clock, so the order is always the same.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipes import PipelineStrategy
from lightning_pipes.ir import Kind, PlanError
from lightning_pipes.strategies.v import V
from lightning_pipes.testing.ranks import run_ranks
from tests.trainer.lit import differences, plain_values, quiet
from tests.trainers import make_trainer
from tests.virtual_clock import VirtualClock

ROWS, REST, WIDTH, LAYERS = 16, 3, 8, 8
FORWARD, INPUTS, WEIGHTS = 0.010, 0.020, 0.004
_time = VirtualClock()


class Pause(torch.autograd.Function):
    """Returns its input. It takes the given seconds on the virtual clock in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.seconds = backward
        _time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _time.sleep(ctx.seconds)
        return gradients[0], None, None


class Paced(nn.Linear):
    """A layer that takes times of its own for the forward, the input gradients, and the weight gradients."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = Pause.apply(self.weight, 0.0, WEIGHTS)  # type: ignore[no-untyped-call]
        out = F.linear(input, weight, self.bias)
        return Pause.apply(out, FORWARD, INPUTS).tanh()  # type: ignore[no-any-return,no-untyped-call]


class Net(pl.LightningModule):
    """A module without a container, whose values skip over stages."""

    def __init__(self) -> None:
        super().__init__()
        for n in range(LAYERS):
            setattr(self, f"layer{n}", Paced())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = x = self.layer0(x)
        for n in range(1, LAYERS):
            x = getattr(self, f"layer{n}")(x)
        return x + skip  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Layered(Net):
    """The same module with a container of layers."""

    def __init__(self, layers: int = LAYERS) -> None:
        pl.LightningModule.__init__(self)
        self.model = nn.Sequential(*(Paced() for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)  # type: ignore[no-any-return]


class FewUnits(Net):
    """A module with too few units for four stages."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer0(batch[0]).mean()  # type: ignore[no-any-return]


class FewLayers(Layered):
    """A module with too few layers for four stages."""

    def __init__(self) -> None:
        super().__init__(3)


class Orders(pl.Callback):
    """Records the schedule and the number of micro-batches of each batch, by the number of samples."""

    def __init__(self) -> None:
        self.schedule: Any = None
        self.microbatches: dict[int, int] = {}

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        plan = trainer.strategy.current_run.engine.plan
        self.schedule = trainer.strategy.schedule
        self.microbatches[plan.jobs[0].rows] = len(plan.spans(Kind.F, 0))


def fit(strategy: Any, devices: int, module: type[Net] = Net) -> tuple[dict[str, Any], Orders]:
    """Train, predict, and return the weights, the metrics and the predictions."""
    torch.manual_seed(0)
    made, orders = module().double(), Orders()
    x = torch.randn(2 * ROWS + REST, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, x.sin()), batch_size=ROWS)
    callbacks = [orders] if devices > 1 else []
    trainer = make_trainer(
        devices=devices, strategy=strategy, max_epochs=2, num_sanity_val_steps=0, callbacks=callbacks
    )
    trainer.fit(made, loader, loader)
    values = plain_values({**made.state_dict(), **trainer.callback_metrics})
    predicted = trainer.predict(made, loader)
    assert predicted is not None
    return {**values, **plain_values({f"predicted {n}": each for n, each in enumerate(predicted)})}, orders


def v(partition: Any = "auto", **settings: Any) -> PipelineStrategy:
    return PipelineStrategy("v", schedule_args=settings, microbatches=8, partition=partition, loss="microbatch")


@contextmanager
def record_messages() -> Iterator[list[str]]:
    """Record the text of the log on rank 0."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.setLevel("INFO")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


LIMITS = {Net: {2: "6KiB", 4: "5KiB"}, Layered: {2: "6.5KiB", 4: "4.5KiB"}}
"""Memory limits that allow more than V-Min and less than ZB-V, by the number of ranks."""
NAMED = {2: ["layer2", "layer4", "layer6"], 4: [f"layer{n}" for n in range(1, LAYERS)]}
SPLIT, WHOLE = (7, 12, 5, 0), (7, 8, 8, 0)
"""The durations of F, I and W, and those of F and the halves of B, in units of 1 / 24 of all of them.

The input gradients are a little shorter than `INPUTS`, because the first layer computes none.
"""
CASES: list[tuple[type[Net], dict[str, Any], Any, Any]] = [
    (Net, {}, "auto", SPLIT),
    (Net, {"memory_limit": LIMITS[Net]}, "auto", SPLIT),
    (Net, {"memory_limit": LIMITS[Net]}, NAMED, SPLIT),
    (Layered, {"memory_limit": LIMITS[Layered]}, "auto", SPLIT),
    (Net, {"memory_limit": "1GiB"}, "auto", SPLIT),
    (Net, {"split": False}, "auto", WHOLE),
    (Net, {}, "parameters", None),
    (Layered, {"memory_limit": LIMITS[Layered]}, [2, 4, 6], SPLIT),
]
"""Modules, settings of the schedule, partitions, and the durations for which the order is made."""
N_CASES = {2: len(CASES), 4: 4}
"""The number of cases, by the number of ranks."""
REFUSED: list[tuple[type[Net], dict[str, Any], str]] = [
    (Net, {"memory_limit": "100B"}, "the order with the least memory (V-Min, k=2) needs 5.62 KiB, of which 4.5 KiB"),
    (Layered, {"memory_limit": "100B"}, "the order with the least memory (V-Min, k=2) needs 6.06 KiB, of which 4.5"),
    (FewUnits, {}, "training_step has 2 units (calls of modules and functions) with 1 possible borders, too few for 4"),
    (FewLayers, {}, "3 layers can't fill 4 stages, because each stage needs at least one layer. Use fewer processes"),
]


def of_ranks(setting: Any, ranks: int) -> Any:
    """Return a setting that may depend on the number of ranks."""
    return setting[ranks] if isinstance(setting, dict) else setting


def fit_all(rank: int, ranks: int) -> tuple[list[tuple[dict[str, Any], Orders, str]], list[str]]:
    """Return the results and the log of each case, and the errors of the cases that are refused."""
    quiet()
    found, errors = [], []
    with pytest.MonkeyPatch.context() as patch:
        _time.patch(patch)
        for kind, settings, partition, _ in CASES[: N_CASES[ranks]]:
            given = {name: of_ranks(value, ranks) for name, value in settings.items()}
            with record_messages() as lines:
                found.append((*fit(v(of_ranks(partition, ranks), **given), ranks, kind), "\n".join(lines)))
        for kind, settings, _ in REFUSED if ranks == 2 else ():
            with pytest.raises(PlanError) as error:
                fit(v(**settings), ranks, kind)
            errors.append(str(error.value))
    return found, errors


@pytest.mark.parametrize("ranks", [2, 4])
def test_runs_are_planned_from_measured_times_and_bytes(ranks: int) -> None:
    """Check the results, the durations of the order, and that the largest k is chosen that fits into the limit.

    Also check that runs which can't be planned are refused by name.
    """
    expected = {kind: fit("auto", 1, kind)[0] for kind in (Net, Layered)}
    for rank, (found, errors) in enumerate(run_ranks(fit_all, ranks, ranks, timeout=600)):
        for (kind, settings, partition, times), (values, orders, lines) in zip(CASES, found, strict=False):
            where = f"{kind.__name__}, {settings}, {partition}, rank {rank}"
            assert differences(expected[kind], values, 1e-10, where) == []
            assert orders.microbatches == {ROWS: 8, REST: 3}, where
            schedule = orders.schedule
            assert schedule.times == times, (where, schedule)
            if settings.get("memory_limit") is LIMITS[kind]:
                assert V.least_held(ranks) < schedule.k < 2 * ranks, (where, schedule)
                if not rank:
                    assert max(estimated_kib(lines)) <= float(LIMITS[kind][ranks].removesuffix("KiB")), (where, lines)
            elif settings.get("memory_limit"):
                assert schedule.k == 2 * ranks, (where, schedule)
        for (*_, part), text in zip(REFUSED, errors, strict=False):
            assert part in text


def estimated_kib(lines: str) -> list[float]:
    """Return the peak memory of each rank that the log of a run reports."""
    (line,) = re.findall("Estimated peak memory of tensors: (.*?)\\. For", lines)
    return [float(each) for each in re.findall(r"([\d.]+) KiB on rank", line)]
