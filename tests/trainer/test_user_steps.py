"""Tests that a rank may run parts of a user's step several times on the same samples without changing the results."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipes.testing.ranks import run_ranks
from tests.cases import selected_values
from tests.trainer.eager import Eager
from tests.trainer.lit import WIDTH, Case, Lit, differences, train, train_cases


class LitInPlace(Lit):
    """A module that changes its batch in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.sub_(0.5).mul_(3.0)
        return self.model(x) + x[:, :3]


class LitEarlyLog(Lit):
    """A module that logs before it calls its layers, so that a sum shows repeated calls."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._log_rows("early", batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._log_rows("early_val", batch)
        super().validation_step(batch, batch_idx)

    def _log_rows(self, name: str, batch: Any) -> None:
        self.log(name, float(len(batch[0])), reduce_fx="sum", on_step=False, on_epoch=True)


class Masked(nn.Module):
    """A layer that mixes the first features of each sample with a mask that has no axis of samples."""

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        x, n = inputs["x"], len(inputs["mask"])
        return torch.cat([x[:, :n] @ inputs["mask"], x[:, n:]], 1) * inputs["weights"]


class LitMask(Lit):
    """A module whose mask has as many rows as evaluation batches have samples."""

    def __init__(self) -> None:
        super().__init__()
        self.model.insert(0, Masked())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(5, 5, dtype=x.dtype).tril()
        return self.model({"x": x, "mask": mask, "weights": x.new_ones(len(x), WIDTH) / 2})


class Stacked(nn.Module):
    """A layer that multiplies copies of the samples on axis 0 by one number per sample."""

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return inputs["copies"] * inputs["weights"]


class LitStacked(Lit):
    """A module whose layers get samples on axis 1, and as many copies on axis 0 as evaluation batches have samples."""

    def __init__(self) -> None:
        super().__init__()
        self.model.insert(0, Stacked())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        copies = torch.stack([x + n for n in range(5)])
        return self.model({"copies": copies, "weights": x[:, :1].sigmoid()}).mean(0)


class LitStackedAlone(LitStacked):
    """A module in which no input of the layers has samples on axis 0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        copies = torch.stack([x + n for n in range(2)])
        return self.model({"copies": copies, "weights": x.new_ones(1, 1)}).mean(0)


def pipeline(schedule: Any = "1f1b", **settings: Any) -> dict[str, Any]:
    """Return the arguments of the strategy, with three micro-batches."""
    return {"schedule": schedule, "microbatches": 3, **settings}


CASES: dict[tuple[str, int], Case] = {
    ("once", 2): Case(LitInPlace, strategy=pipeline(), evaluate=True),
    ("recompute", 2): Case(LitInPlace, strategy=pipeline("gpipe", recompute=True)),
    ("both ends", 2): Case(LitInPlace, strategy=pipeline(Eager()), evaluate=True),
    ("both ends, recompute", 2): Case(LitInPlace, strategy=pipeline(Eager(), recompute=True), evaluate=True),
    ("one stage", 1): Case(LitInPlace, strategy=pipeline(), evaluate=True),
    ("two stages", 1): Case(LitInPlace, strategy=pipeline("interleaved"), evaluate=True),
    ("two stages, recompute", 1): Case(LitInPlace, strategy=pipeline("interleaved", recompute=True)),
    ("early log", 1): Case(LitEarlyLog, strategy=pipeline("interleaved")),
    ("early log", 2): Case(LitEarlyLog, strategy=pipeline()),
    ("mask", 1): Case(LitMask, strategy=pipeline("interleaved"), evaluate=True),
    ("mask", 2): Case(LitMask, strategy=pipeline(), evaluate=True),
    ("axis 1", 2): Case(LitStacked, strategy=pipeline(), evaluate=True),
    ("axis 1 alone", 2): Case(LitStackedAlone, strategy=pipeline(), evaluate=True),
}


@cache
def on_one_process(module: type[Lit], evaluate: bool) -> dict[str, Any]:
    """Return the results of a module on one process without a pipeline."""
    return train(Case(module, evaluate=evaluate), 1, Path(mkdtemp()))


@cache
def in_a_pipeline(ranks: int) -> dict[tuple[str, int], tuple[dict[str, Any], ...]]:
    """Return the results of all ranks for each selected case. Cases with this number of ranks share processes."""
    keys = [key for key in selected_values(test_parity, "key") if key[1] == ranks]
    found = run_ranks(train_cases, ranks, [CASES[key] for key in keys], ranks, mkdtemp(), timeout=120)
    return dict(zip(keys, zip(*found, strict=True), strict=True))


@pytest.mark.parametrize("key", CASES, ids=lambda key: f"{key[0]} on {key[1]}")
def test_parity(key):
    plain = on_one_process(CASES[key].module, CASES[key].evaluate)
    for found in in_a_pipeline(key[1])[key]:
        for what in plain.keys() - {"rows", "gradients"}:
            assert differences(found[what], plain[what], at=what) == []
