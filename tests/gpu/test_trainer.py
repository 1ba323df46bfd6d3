"""Complete trainings on a GPU that several ranks share give the same results as one process."""

from __future__ import annotations

from tempfile import mkdtemp
from typing import Any

import pytest
import torch

from lightning_pipes.testing.ranks import run_ranks
from tests.toys.install import install
from tests.trainer.lit import Case, Lit, LitHooked, LitOutside, LitTied, differences, train
from tests.trainer.one_gpu import SHARED, on_one_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BOTH = ("outputs", "metrics", "weights", "rates", "steps")


def both(rank: int, ranks: int, cases: list[Case], folder: str) -> list[Any]:
    """Run each case on one rank of a shared GPU, and return the results."""
    options = on_one_gpu(ranks)
    return [
        train(
            Case(c.module, c.settings, c.strategy and c.strategy | SHARED, options | c.trainer, c.evaluate),
            ranks,
            f"{folder}/{n}",
        )
        for n, c in enumerate(cases)
    ]


CASES = [
    Case(Lit, {}, {"schedule": "1f1b", "microbatches": 4}, evaluate=True),
    Case(Lit, {"optimizer": "sgd"}, {"schedule": "gpipe", "microbatches": 3, "recompute": True}),
    Case(LitOutside, {}, {"schedule": "zero_bubble", "microbatches": 4}),
    Case(LitTied, {}, {"schedule": "kfkb", "microbatches": 4, "schedule_args": {"k": 2}}),
    Case(LitHooked, {}, {"schedule": "interleaved", "microbatches": 2}, {"gradient_clip_val": 0.05}, True),
    Case(Lit, {}, {"schedule": "um1f1b", "microbatches": 4}),
    Case(Lit, {}, {"schedule": "hanayo", "microbatches": 4}),
]


@pytest.mark.parametrize("ranks", [1, 2])
def test_equals_one_process(ranks: int) -> None:
    plain = run_ranks(both, 1, 1, [c.plain() for c in CASES], mkdtemp(), timeout=300)[0]
    for found in run_ranks(both, ranks, ranks, CASES, mkdtemp(), timeout=300):
        for case, got, wanted in zip(CASES, found, plain, strict=True):
            for key in (*BOTH, "validated", "tested"):
                assert differences(got.get(key), wanted.get(key)) == [], (case.strategy, key)


def moved(rank: int, folder: str) -> list[Any]:
    """Return the results of a run whose layers move twice, and of a run that drains without moving layers."""
    install("mover")
    options = on_one_gpu(2) | {"max_steps": 24, "max_epochs": -1, "limit_val_batches": 0}
    strategy = {"schedule": "mover", "partition": "parameters"} | SHARED
    return [
        train(
            Case(Lit, {"dropout": 0.2}, {**strategy, "schedule_args": {"moves": moves}}, options),
            2,
            f"{folder}/{moves}",
        )
        for moves in (True, False)
    ]


def test_layers_move_between_ranks() -> None:
    for one, other in run_ranks(moved, 2, mkdtemp(), timeout=120):
        for key in BOTH:
            assert differences(one[key], other[key], tolerance=0) == [], key


class LitFloat(Lit):
    """A module that converts its samples to single precision."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x.float(), y


def precise(rank: int, precision: str, folder: str) -> Any:
    """Train on two ranks with the given precision."""
    options = on_one_gpu(2) | {"precision": precision}
    return train(Case(LitFloat, {}, {"schedule": "1f1b", "microbatches": 2} | SHARED, options), 2, folder)


def plainly(rank: int, precision: str, folder: str) -> Any:
    """Train in one process without a pipeline with the given precision."""
    return train(Case(LitFloat, {}, None, on_one_gpu(1) | {"precision": precision}), 1, folder)


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16-mixed", 0.05), ("16-mixed", 0.05), ("32-true", 1e-4)])
def test_precisions(precision: str, tolerance: float) -> None:
    (wanted,) = run_ranks(plainly, 1, precision, mkdtemp(), timeout=120)
    for found in run_ranks(precise, 2, precision, mkdtemp(), timeout=120):
        assert differences(found["weights"], wanted["weights"], tolerance) == []
