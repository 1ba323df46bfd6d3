"""Tests of the cost of sequences by their lengths: its fit, its measurement before training, and its use."""

from __future__ import annotations

from functools import cache
from itertools import combinations
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from lightning_pipes.ir.instruction import even_spans
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.data.length_cost import LengthCost, divide_lengths
from lightning_pipes.trainer.data.token_cut import TokenCutter
from lightning_pipes.trainer.plan import decider
from tests.trainer.data.token_modules import LENGTHS, batch_of
from tests.trainer.lit import differences, plain_values, quiet, rank_zero_lines
from tests.trainers import make_trainer
from tests.virtual_clock import VirtualClock

TIME = VirtualClock()
GROWTH, WIDTH = 0.1, 4
LINES = [2, 9, 4, 24, 6, 5, 11, 3, 3, 7, 16, 8, 5, 4, 20, 6, *(5, 30, 3, 4, 8, 2, 9, 4, 24, 6, 5, 11, 3, 3, 7, 16)]
"""The lengths of the sequences of two batches. The second batch has a longer sequence than the first one."""


class Quadratic(nn.Linear):
    """A layer whose time grows with the square of the length, on a virtual clock."""

    shapes: set[tuple[int, ...]] = set()

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        TIME.sleep(2e-4 * rows * length * (1 + GROWTH * length))
        Quadratic.shapes.add((rows, length))
        return x + super().forward(x).tanh()


class LitLines(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(11, WIDTH), *(Quadratic() for _ in range(6)), nn.Linear(WIDTH, 11))

    def on_train_start(self) -> None:
        self.measured, Quadratic.shapes = Quadratic.shapes, set()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.layers(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(ranks: int, **settings: Any) -> dict[str, Any]:
    quiet()
    decider._profiles.clear()
    Quadratic.shapes = set()
    pl.seed_everything(0, verbose=False)
    module = LitLines().double()
    data: Any = LINES
    strategy: Any = "auto"
    if ranks > 1:
        strategy = PipelineStrategy(**{"schedule": "1f1b", "microbatches": 4, "microbatches_by": "tokens", **settings})
    trainer = make_trainer(devices=ranks, strategy=strategy, max_epochs=1)
    with rank_zero_lines() as lines:
        trainer.fit(module, DataLoader(data, batch_size=16, collate_fn=batch_of))
    found = {"weights": plain_values(dict(module.state_dict())), "shapes": sorted(Quadratic.shapes)}
    if ranks > 1:
        cost = strategy.decision.length_cost
        found |= {"cost": (cost.growth, cost.longest), "measured": sorted(module.measured), "lines": lines}
    return found


def trained_all(rank: int) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_PIPES_PROFILES", "")
        TIME.patch(patch)
        return [trained(2), trained(2, partition="parameters"), trained(2, schedule="auto", microbatches=None)]


@cache
def runs() -> list[list[dict[str, Any]]]:
    return run_ranks(trained_all, 2, timeout=240)


def test_measured_cost() -> None:
    """The cost is fitted to the times of three lengths, the same on all ranks, and training is that of one process."""
    alone = trained(1)["weights"]
    for found in runs():
        measured, by_tokens, chosen = found
        for each in (measured, chosen):
            assert each["cost"] == pytest.approx((GROWTH, 24), rel=0.02)
        assert [each["cost"] for each in found] == [each["cost"] for each in runs()[0]]
        assert by_tokens["cost"] == (0.0, 0)
        for each in found:
            assert differences(each["weights"], alone, 1e-9) == []


def test_measured_lengths() -> None:
    """Layers are measured with the mean length of micro-batches, and with the longest sequences and parts of them."""
    measured, by_tokens, _ = runs()[0]
    cutter = TokenCutter(2)
    batch = batch_of(LINES[:16])
    made = cutter.cut(batch, 16, even_spans(16, 4), ())
    assert made is not None
    mean = -(-sum(span.rows * width for span, width in made.widths.items()) // 16)
    tokens = 4 * mean
    assert (4, mean) in measured["measured"]
    for width in (24, 12, 6):
        assert (min(16, tokens // width), width) in measured["measured"]
    assert {shape[1] for shape in measured["measured"]} <= {mean, 24, 12, 6}
    assert by_tokens["measured"] == [(4, 24)]  # the choice of the container runs the step once


def test_micro_batches_of_equal_time() -> None:
    """With the measured cost, the largest micro-batch takes less time than with equal numbers of tokens."""
    measured, by_tokens, _ = runs()[0]

    def seconds(found: dict[str, Any]) -> float:
        return max(rows * n * (1 + GROWTH * n) for rows, n in found["shapes"])

    assert measured["shapes"] != by_tokens["shapes"]
    assert seconds(measured) <= seconds(by_tokens)


def test_longer_sequences_than_measured() -> None:
    """The log says once that the times of longer sequences are extrapolated."""
    measured, by_tokens, _ = runs()[0]
    lines = [line for line in measured["lines"] if "extrapolated" in line]
    assert lines == [
        "A batch has sequences of 30 tokens, and times were measured for up to 24. The times of longer sequences are "
        "extrapolated"
    ]
    assert not any("extrapolated" in line for line in by_tokens["lines"])


@pytest.mark.parametrize(
    ("seconds", "growth"),
    [
        ({8: 1.8, 4: 1.4, 2: 1.2}, 0.1),
        ({8: 1.0, 4: 1.0, 2: 1.0}, 0.0),
        ({8: 1.0, 4: 1.1, 2: 1.4}, 0.0),  # short sequences take longer, as if each call took time
        ({8: 8.0, 2: 2.0}, 12.5),  # all of the time is attention
    ],
)
def test_fit(seconds: dict[int, float], growth: float) -> None:
    found = LengthCost.from_times(seconds)
    assert found.growth == pytest.approx(growth, abs=1e-9)
    assert found.longest == 8


@pytest.mark.parametrize("growth", [0.05, 2.0])
def test_division_by_cost(growth: float) -> None:
    """The groups take the least time for costs that grow with the square of the length."""
    cost, generator, ratios = LengthCost(growth), np.random.default_rng(0), []

    def seconds(lengths: Any, ends: list[int]) -> float:
        costs = [(b - a) * lengths[a] * (1 + growth * lengths[a]) for a, b in zip([0, *ends], ends, strict=False)]
        return float(sum(costs) + 3 * max(costs))

    for _ in range(20):
        lengths = np.sort(generator.integers(1, 40, 9))[::-1]
        every = [[*each, 9] for each in combinations(range(1, 9), 3)]
        ratios.append(
            seconds(lengths, divide_lengths(lengths, 4, 4, cost=cost)) / min(seconds(lengths, e) for e in every)
        )
    assert max(ratios) < 1.03


def test_sequences_for_measurements() -> None:
    """The longest sequences are taken, with all of their columns, and cropped or padded to one length."""
    batch = batch_of(LENGTHS[0])
    sample = TokenCutter(2).sample_sequences(batch, 12, 3)
    assert sample is not None
    assert sample.longest == 29
    assert sum(LENGTHS[0]) / 12 <= sample.mean < 29
    part = sample.take(4, 10)
    assert part["number"].tolist() == [3, 10, 6, 1]
    assert torch.equal(part["input_ids"], batch["input_ids"][[3, 10, 6, 1], :10])
    assert TokenCutter(2).sample_sequences(batch_of([5] * 8), 8, 2) is None
    assert TokenCutter(2).sample_sequences(torch.ones(4, 3), 4, 2) is None
