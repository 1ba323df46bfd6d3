"""Tests of the cost of sequences by their lengths: its fit, its measurement before training, and its use."""

from __future__ import annotations

from functools import cache
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from lightning_pipes.ir import Span
from lightning_pipes.ir.instruction import even_spans
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.data.length_cost import LengthCost, divide_lengths
from lightning_pipes.trainer.data.token_cut import TokenCutter
from lightning_pipes.trainer.plan import decider
from lightning_pipes.trainer.watchers.length_times import LengthTimes
from tests.trainer.data.token_modules import LENGTHS, batch_of
from tests.trainer.lit import differences, plain_values, quiet, rank_zero_lines
from tests.trainers import make_trainer
from tests.virtual_clock import VirtualClock

TIME = VirtualClock()
GROWTH, WIDTH = 0.1, 4
LINES = [2, 9, 4, 24, 6, 5, 11, 3, 3, 7, 16, 8, 5, 4, 20, 6, *(5, 30, 3, 4, 8, 2, 9, 4, 24, 6, 5, 11, 3, 3, 7, 16)]
"""The lengths of the sequences of two batches. The second batch has a longer sequence than the first one."""


LONGER = [*LINES[:16], *([*LINES[:14], 30, 31] * 4)]
"""The lengths of five batches. All batches but the first one have longer sequences."""


class Quadratic(nn.Linear):
    """A layer whose time grows with the square of the length, on a virtual clock."""

    shapes: set[tuple[int, ...]] = set()
    slower = 1.0
    """The factor of the time of sequences with more than 24 tokens."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        factor = Quadratic.slower if length > 24 else 1.0
        TIME.sleep(2e-4 * rows * length * (1 + GROWTH * length) * factor)
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


class Costs(pl.Callback):
    """Records the cost of sequences after each batch, on this rank."""

    def __init__(self) -> None:
        self.found: list[tuple[float, int]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        cutter = trainer.strategy.current_run.token_cutter
        self.found.append((cutter.cost.growth, cutter.cost.longest))


def trained(ranks: int, data: Any = LINES, **settings: Any) -> dict[str, Any]:
    quiet()
    decider._profiles.clear()
    Quadratic.shapes = set()
    pl.seed_everything(0, verbose=False)
    module = LitLines().double()
    strategy: Any = "auto"
    costs = Costs()
    if ranks > 1:
        strategy = PipelineStrategy(**{"schedule": "1f1b", "microbatches": 4, "microbatches_by": "tokens", **settings})
    trainer = make_trainer(
        devices=ranks,
        strategy=strategy,
        max_epochs=1,
        callbacks=[costs] if ranks > 1 else [],
        use_distributed_sampler=False,
    )
    with rank_zero_lines() as lines:
        trainer.fit(module, DataLoader(data, batch_size=16, collate_fn=batch_of))
    found = {"weights": plain_values(dict(module.state_dict())), "shapes": sorted(Quadratic.shapes)}
    if ranks > 1:
        cost = strategy.decision.length_cost
        found |= {"cost": (cost.growth, cost.longest), "measured": sorted(module.measured), "lines": lines}
        found["costs"] = costs.found
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


LONG_RUNS: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "recomputed": {"recompute": True},
    "zero bubble": {"schedule": "zero_bubble"},
    "dynpipe": {"schedule": "dynpipe"},
}


def trained_longer(rank: int) -> dict[str, dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_PIPES_PROFILES", "")
        patch.setattr(Quadratic, "slower", 1.0 + 2.0 * rank)  # 2.0 on average
        TIME.patch(patch)
        return {name: trained(2, LONGER, **each) for name, each in LONG_RUNS.items()}


@cache
def trained_alone() -> Any:
    return trained(1, LONGER)["weights"]


@cache
def long_runs() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(trained_longer, 2, timeout=240)


@pytest.mark.parametrize("name", LONG_RUNS)
def test_longer_sequences_are_measured(name: str) -> None:
    """After three batches with longer sequences, all ranks use the cost that fits their times, too.

    If batches overlap, the cost stays as it is.
    """
    overlaps = name == "dynpipe"
    for found in long_runs():
        costs = found[name]["costs"]
        assert costs == long_runs()[0][name]["costs"]
        assert overlaps or differences(found[name]["weights"], trained_alone(), 1e-9) == []
        before, after = costs[2], costs[-1]
        assert costs == ([before] * 5 if overlaps else [before] * 3 + [after] * 2)
        assert before == pytest.approx((GROWTH, 24), rel=0.02)
        if not overlaps:
            units = {24: 3.4, 12: 2.2, 6: 1.6, 31: 2 * 4.1}
            assert after == pytest.approx((LengthCost.from_times(units).growth, 31), rel=0.05)
    lines = [line for line in long_runs()[0][name]["lines"] if "were measured" in line]
    assert len(lines) == (1 if overlaps else 2)
    if not overlaps:
        growth = long_runs()[0][name]["costs"][-1][0]
        assert lines[1] == (
            "Sequences of up to 31 tokens were measured in 3 batches, and until then sequences of up to 24. In a "
            f"sequence of n tokens, a token now counts as 1 + {growth:.3g} n, and no longer as 1 + 0.1 n"
        )


def trained_replicas(rank: int) -> list[tuple[float, int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_PIPES_PROFILES", "")
        patch.setattr(Quadratic, "slower", 2.0)
        TIME.patch(patch)
        data = LONGER if rank < 2 else LINES[:16] * 5
        costs: list[tuple[float, int]] = trained(4, data, data_parallel=2)["costs"]
        return costs


def test_longer_sequences_of_one_replica() -> None:
    """The ranks of the replica that has longer sequences measure them, and no other rank waits for them."""
    found = run_ranks(trained_replicas, 4, timeout=240)
    assert [costs[-1][1] for costs in found] == [31, 31, 24, 24]
    assert found[0] == found[1]


def test_sequences_that_are_slightly_longer() -> None:
    """Batches are measured if micro-batches with enough tokens are clearly longer, and others are not."""
    run: Any = SimpleNamespace(listeners=[])
    watcher = LengthTimes(run, TokenCutter(2, cost=LengthCost(GROWTH, 20)))
    expected = {(21, 9): False, (22, 9): True, (30, 25): False, (30, 1): False, (30, 9, 1): True}
    for number, (lengths, measured) in enumerate(expected.items()):
        widths = {Span(4 * n, 4 * n + 4): each for n, each in enumerate(lengths)}
        step: Any = SimpleNamespace(token_cut=SimpleNamespace(widths=widths), number=number)
        before = len(watcher._batches)
        watcher.around_batch(step)
        assert len(watcher._batches) - before == measured, lengths


@pytest.mark.parametrize("factor", [1.0, 2.0, 0.5])
def test_cost_of_longer_sequences(factor: float) -> None:
    """One slow micro-batch changes nothing, and faster or slower long sequences change the growth."""
    cost = LengthCost(GROWTH, 20)
    times = [(n, 3.0 * (1 + GROWTH * n) * (factor if n > 20 else 1.0)) for n in (30, 30, 40, 9, 12, 20, 4)]
    found = cost.with_longer([*times, (30, 1000.0), (4, 1000.0)])
    assert found.longest == 40
    change = {1.0: 0.0, 2.0: 1.0, 0.5: -1.0}[factor]
    assert np.sign(round(found.growth - GROWTH, 9)) == change
    assert cost.with_longer([(n, 7 * seconds) for n, seconds in times]).growth == pytest.approx(found.growth)


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
