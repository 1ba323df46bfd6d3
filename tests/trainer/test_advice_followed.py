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
from lightning_pipes.planning.advice import advise
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


def followed(rank: int) -> dict[str, Any]:
    first = PipelineStrategy("1f1b", microbatches=4, partition=[5])
    fit(LitSleepers(), first, 2)
    layers = list(LitSleepers().double().model)
    profile = profile_layers(layers, {n: torch.zeros(n, 6, dtype=torch.float64) for n in (1, 2, 4)}, repeats=1)
    advice = advise(replace(first.report.record, profile=profile))
    assert advice.proposed is not None
    arguments = dict(advice.proposed.arguments)
    second = PipelineStrategy(**arguments)
    fit(LitSleepers(), second, 2)
    return {
        "sentence": advice.sentence,
        "claimed": advice.proposed.seconds,
        "before": first.report.measured.makespan / 1e9,
        "after": second.report.measured.makespan / 1e9,
        "arguments": arguments,
    }


def test_the_advice_comes_true():
    found = run_ranks(followed, 2, timeout=90)[0]
    assert found["sentence"].startswith("Stage 0 takes ")
    assert found["arguments"]["partition"] == [3]
    assert found["after"] < 0.95 * found["before"]
    assert found["after"] == pytest.approx(found["claimed"], rel=0.4)  # whatever else runs here
