"""Checks that following the advice of a report brings the predicted speed, with emulated layers on a virtual clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipes import PipelineStrategy
from lightning_pipes.cost.layer import LayerProfile
from lightning_pipes.cost.profile import ModelProfile
from lightning_pipes.planning.advice import advise_run
from lightning_pipes.sim.records.record import RunRecord
from lightning_pipes.testing.ranks import run_ranks
from tests.trainer.lit import Lit
from tests.trainer.reports.runs import fit
from tests.virtual_clock import VirtualClock

SECONDS = 0.006
"""Duration of a layer's forward for one sample."""
TIME = VirtualClock()


class Sleeper(nn.Linear):
    """A linear layer that advances the virtual clock."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        TIME.sleep(SECONDS * len(x))
        return super().forward(x)


class LitSleepers(Lit):
    """A module with six emulated layers."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.model = nn.Sequential(*(Sleeper(6, 6) for _ in range(5)), Sleeper(6, 3))


def run(rank: int, arguments: dict[str, Any]) -> RunRecord:
    """Train with the given arguments of the strategy and return the record of the run."""
    strategy = PipelineStrategy(**arguments)
    with pytest.MonkeyPatch.context() as patch:
        TIME.patch(patch)
        fit(LitSleepers(), strategy, 2)
    return strategy.report.record


def seconds(record: RunRecord) -> float:
    """Return the measured makespan of a record in seconds."""
    assert record.measured is not None
    return record.measured.makespan / 1e9


def test_the_advice_comes_true():
    """A run with stages of five layers and one layer, and a run with the advised cut, both take the predicted time."""
    before = run_ranks(run, 2, {"schedule": "1f1b", "microbatches": 4, "partition": [5]}, timeout=90)[0]
    table = tuple((rows, SECONDS * rows) for rows in (1, 2, 4))
    layer = LayerProfile("", table, tuple((rows, SECONDS * rows / 10) for rows, _ in table), output=((1, 48.0),))
    profile = ModelProfile((layer,) * 6)
    advice = advise_run(replace(before, profile=profile))
    assert advice.sentence.startswith("Stage 0 takes ")
    assert advice.proposed is not None
    arguments = dict(advice.proposed.arguments)
    assert arguments["partition"] == [3]
    after = seconds(run_ranks(run, 2, arguments, timeout=90)[0])
    rows, layers = 2, 3  # the last stage waits for one micro-batch and then runs four
    assert seconds(before) == pytest.approx((5 * 4 + 1) * rows * SECONDS, rel=0.02)
    assert after == pytest.approx((1 + 4) * layers * rows * SECONDS, rel=0.02)
