"""Somebody runs, reads the report, does what it says, and runs again: emulated layers, which sleep."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipes import PipelineStrategy
from lightning_pipes.engine.compute.profiler import profile_layers
from lightning_pipes.planning.advice import advise_run
from lightning_pipes.sim.shown.record import RunRecord
from lightning_pipes.testing.ranks import run_ranks
from tests.trainer.lit import Lit
from tests.trainer.reports.runs import fit


class Sleeper(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.006 * len(x))
        return super().forward(x)


class LitSleepers(Lit):
    def __init__(self) -> None:
        super().__init__(layers=1)
        self.model = nn.Sequential(*(Sleeper(6, 6) for _ in range(5)), Sleeper(6, 3))


def run(rank: int, arguments: dict[str, Any]) -> RunRecord:
    strategy = PipelineStrategy(**arguments)
    fit(LitSleepers(), strategy, 2)
    return strategy.report.record


def seconds(record: RunRecord) -> float:
    assert record.measured is not None
    return record.measured.makespan / 1e9


@pytest.mark.alone
def test_the_advice_comes_true():
    """Layers are profiled once, for both ranks: on a busy machine each might find another advice."""
    before = run_ranks(run, 2, {"schedule": "1f1b", "microbatches": 4, "partition": [5]}, timeout=90)[0]
    layers = list(LitSleepers().double().model)
    profile = profile_layers(layers, {n: torch.zeros(n, 6, dtype=torch.float64) for n in (1, 2, 4)}, repeats=1)
    advice = advise_run(replace(before, profile=profile))
    assert advice.sentence.startswith("Stage 0 takes ")
    assert advice.proposed is not None
    arguments = dict(advice.proposed.arguments)
    assert arguments["partition"] == [3]
    after = seconds(run_ranks(run, 2, arguments, timeout=90)[0])
    assert after < 0.95 * seconds(before)
    assert after == pytest.approx(advice.proposed.seconds, rel=0.4)  # whatever else runs here
