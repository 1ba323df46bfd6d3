"""Tests of the warning about a loss that is not a mean over samples.

The warning must name the numbers of one process, and the check must leave no trace in the training.
"""

from __future__ import annotations

import re
import warnings
from functools import cache, partial
from tempfile import mkdtemp
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from lightning_pipes.arrays.array import JobArray
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.results.loss_weights import losses_differ
from lightning_pipes.trainer.watchers import loss_check
from tests.compat.models import LitGPT2, LitLlama
from tests.trainer.lit import Case, Lit, data, differences, quiet, train_cases
from tests.trainers import make_trainer

LEAST = -0.6  # two and three samples of the halves of the first batch count, and none of its first quarter
LOSS = re.compile(r"(\w+)\.training_step returns a loss that is not a mean over samples\. It is (\S+) .* and (\S+) as")


class LitPadded(Lit):
    """A mean over the labels that are not ignored, whose number differs between micro-batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self(x), y.masked_fill(x[:, 0] < LEAST, -100), ignore_index=-100)


class LitContrastive(Lit):
    """Compares each sample with all others."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = F.normalize(self(batch[0]), dim=1)
        return F.cross_entropy(h @ batch[0][:, :3].T, torch.arange(len(h)))


class LitSum(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": F.cross_entropy(self(batch[0]), batch[1], reduction="sum")}


class LossLayer(nn.Module):
    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(inputs["x"], inputs["y"], ignore_index=-100)


class On(nn.Module):
    """Applies a layer to the part of the input that changes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"x": self.layer(inputs["x"]), "y": inputs["y"]}


class LitInside(Lit):
    """A module whose last layer computes the loss."""

    padded = True

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.model = nn.Sequential(*map(On, self.model), LossLayer())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return self.model({"x": x, "y": y.masked_fill(x[:, 0] < LEAST, -100) if self.padded else y})

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def on_validation_epoch_end(self) -> None:
        pass


class LitInsideMean(LitInside):
    padded = False


class LitRandom(Lit):
    """A mean over samples after a dropout, which draws different numbers for a whole batch."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.model(x))


class LitRandomPadded(LitRandom):
    training_step = LitPadded.training_step


class LitMixup(Lit):
    """A loss with a random permutation, which evaluation mode does not turn off."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self(x), y[torch.randperm(len(y))])


class LitOwnGenerator(Lit):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.random = torch.Generator().manual_seed(0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self(x) * torch.rand(len(x), 1, generator=self.random), y)


class LitNotWhole(Lit):
    """A step that fails on as many samples as a whole batch has."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert len(batch[0]) < 8, "too many"
        return self.loss(batch)


class LitTraces(Lit):
    """Leaves every kind of trace that a step can leave, and changes its batch in place."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.norm = nn.BatchNorm1d(3)
        self.steps, self.rows = 0, [0]
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch[0].mul_(2.0)
        self.steps += 1
        self.rows.append(len(batch[0]))
        self.count += 1
        out = super().training_step(batch, batch_idx)
        self.norm(out["logits"].detach())
        return out


class Warned(Callback):
    """Records the traces in the module after each batch."""

    def __init__(self) -> None:
        self.left: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if isinstance(module, LitTraces):
            norm = {name: t.tolist() for name, t in module.norm.state_dict().items()}
            self.left.append((module.steps, list(module.rows), float(module.count), norm))


def fitted(
    kind: type[Lit], strategy: dict[str, Any] | None, ranks: int, options: dict[str, Any] | None = None
) -> tuple[list[str], list[Any], dict[str, Any]]:
    """Return the warnings about the loss, the traces, and the metrics of a short run."""
    quiet()
    pl.seed_everything(3, verbose=False)
    module, seen = kind().double(), Warned()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(
            devices=ranks,
            strategy="auto" if strategy is None else PipelineStrategy(partition="parameters", **strategy),
            max_epochs=1,
            limit_val_batches=0,
            callbacks=[seen],
            **options or {},
        )
        trainer.fit(module, DataLoader(data(tokens=getattr(kind, "tokens", False)), batch_size=8))
    said = [str(w.message) for w in caught if "mean over samples" in str(w.message)]
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return said, seen.left, metrics


def fitted_all(rank: int, ranks: int, kinds: list[type[Lit]], strategy: dict[str, Any]) -> list[Any]:
    return [fitted(kind, strategy, ranks) for kind in kinds]


@cache
def plainly(kind: type[Lit], parts: int) -> list[float]:
    """Return the loss of the whole first batch and the mean loss of its parts, without a pipeline."""
    pl.seed_everything(3, verbose=False)
    module = kind().double()
    x, y = next(iter(DataLoader(data(tokens=getattr(kind, "tokens", False)), batch_size=8)))
    module.eval()  # turns dropout off
    steps = [module.training_step(batch, 0) for batch in [(x, y), *zip(x.chunk(parts), y.chunk(parts), strict=True)]]
    whole, *rest = [(out["loss"] if isinstance(out, dict) else out).item() for out in steps]
    return [whole, sum(rest) / parts]


DIFFERENT = [LitPadded, LitContrastive, LitInside, LitRandomPadded]
ALIKE = [Lit, LitSum, LitRandom, LitInsideMean, LitMixup, LitOwnGenerator, LitNotWhole]


@pytest.mark.parametrize(
    ("schedule", "ranks", "parts", "kinds"),
    [
        ("1f1b", 2, 2, [LitPadded, LitInside, Lit]),
        ("pipedream", 2, 4, [LitPadded, LitRandom]),
        ("interleaved", 1, 4, DIFFERENT + ALIKE),
    ],
    ids=["1f1b", "pipedream", "interleaved"],
)
def test_both_numbers_are_those_without_a_pipeline(schedule, ranks, parts, kinds):
    strategy = {"module": "model", "schedule": schedule, "microbatches": parts}
    found = run_ranks(fitted_all, ranks, ranks, kinds, strategy, timeout=180)
    for kind, runs in zip(kinds, zip(*found, strict=True), strict=True):
        assert [said for said, *_ in runs[1:]] == [[]] * (ranks - 1)  # only rank 0 warns
        said = runs[0][0]
        if kind in ALIKE:
            assert said == [], kind
            continue
        (text,) = said  # and only once
        name, *numbers = LOSS.match(text).groups()
        assert name == kind.__name__
        assert [float(n) for n in numbers] == pytest.approx(plainly(kind, parts), rel=1e-5, nan_ok=True), kind
        assert "microbatches=1" in text
        assert "check_loss=False" in text


def test_a_forward_that_is_cut_is_looked_at_where_the_backward_is_not():
    counts = {"forward": (2,), "backward": (1,)}
    assert fitted(LitPadded, {"schedule": "umpipe", "microbatches": None, "schedule_args": counts}, 1)[0] != []


def test_nothing_is_said_where_nothing_is_cut_or_nobody_asks():
    for strategy in ({"microbatches": 1}, {"microbatches": 2, "check_loss": False}):
        assert fitted(LitPadded, strategy, 1)[0] == []


def test_looking_leaves_no_trace():
    """Check that counters, lists, buffers, running means and metrics equal their values in one process.

    A run without the check cannot know which values are sums over samples.
    """
    strategies = ({"microbatches": 2}, {"microbatches": 2, "check_loss": False}, None)
    looks, does_not, plain = (fitted(LitTraces, strategy, 1)[1:] for strategy in strategies)
    for (*others, norm), (*of_one, norm_of_one) in zip(looks[0], plain[0], strict=True):
        assert others == of_one
        assert norm["running_mean"] == pytest.approx(norm_of_one["running_mean"], rel=1e-6)
        assert norm["num_batches_tracked"] == norm_of_one["num_batches_tracked"]
    assert looks[1] == does_not[1]
    assert [norm for *_, norm in looks[0]] == [norm for *_, norm in does_not[0]]
    steps, rows, count, _ = does_not[0][0]
    assert (steps, rows, count) == (1, [0, 4], 1.0)


def test_training_equals_a_run_without_the_check():
    """Check that weights, losses, logs and random numbers are bitwise the same with and without the check.

    Gradients accumulate over batches, and one of the modules draws from its own generator.
    """
    for kind in (LitRandom, LitOwnGenerator, LitTraces):
        cases = [
            Case(
                kind,
                {"dropout": 0.3},
                {"microbatches": 3, "check_loss": check, "schedule": "interleaved"},
                {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0},
            )
            for check in (True, False)
        ]
        looks, does_not = run_ranks(train_cases, 1, cases, 1, mkdtemp(), timeout=180)[0]
        assert differences(looks, does_not, tolerance=0.0) == []


def test_each_sibling_of_an_array_is_looked_at_once(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(loss_check, "rank_zero_warn", said.append)
    jobs = [partial(fitted, kind, {"microbatches": 2}, 1) for kind in (LitPadded, Lit, LitContrastive)]
    assert [end.error for end in JobArray(2).run(jobs)] == [None] * 3
    assert sorted(text.split(".")[0] for text in said) == ["LitContrastive", "LitPadded"]


def with_replicas(rank: int) -> Any:
    return fitted(LitContrastive, {"microbatches": 2, "data_parallel": 2}, 2)[0]


def test_replicas_warn_once():
    first, second = run_ranks(with_replicas, 2, timeout=180)
    assert (len(first), second) == (1, [])


def test_rounding_is_not_a_difference():
    """Check the limits of rounding, also for a loss that is smaller than its rounding because its terms cancel out."""
    half, single, double = torch.bfloat16, torch.float32, torch.float64
    assert not losses_differ(2.0, 2.00001, [2.0], single, {single})
    assert losses_differ(2.0, 2.0002, [2.0], single, {single})
    assert losses_differ(2.0, 2.0000001, [2.0], double, {double})
    assert not losses_differ(2.0, 2.0001, [2.0], single, {single, half})
    assert losses_differ(2.0, 2.001, [2.0], single, {single, half})
    assert not losses_differ(2.0, 2.01, [2.0], half, {half})
    assert losses_differ(2.0, 2.03, [2.0], half, {half})
    assert not losses_differ(1e-7, 0.0, [1.0, -1.0], single, {single})
    # a micro-batch contains only padding
    assert losses_differ(2.0, float("nan"), [2.0, 2.0, float("nan")], single, {single})
    assert not losses_differ(float("nan"), float("nan"), [2.0], single, {single})


class LitPaddedGPT2(LitGPT2):
    """The model's own loss, with padding after the end of each text."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, _ = batch
        labels = tokens.masked_fill((tokens == 7).cumsum(1) > 0, -100)
        return self.net(input_ids=tokens, labels=labels).loss


class LitPaddedLlama(LitLlama):
    training_step = LitPaddedGPT2.training_step


def test_padded_labels_of_hugging_face_models():
    kinds: list[Any] = [LitPaddedGPT2, LitPaddedLlama]
    (found,) = run_ranks(fitted_all, 1, 1, kinds, {"microbatches": 2}, timeout=180)
    for kind, (said, _, _) in zip(kinds, found, strict=True):
        name, *numbers = LOSS.match(said[0]).groups()
        assert (name, len(said)) == (kind.__name__, 1)
        assert [float(n) for n in numbers] == pytest.approx(plainly(kind, 2), rel=1e-5)
