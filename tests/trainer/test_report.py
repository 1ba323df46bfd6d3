"""What a run did, against what the simulator foretells."""

from __future__ import annotations

import json
import time
from html import escape
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from lightning_pipes.cost import CostModel
from lightning_pipes.sim.record import RunRecord
from lightning_pipes.testing.ranks import run_ranks
from tests.trainer.lit import Lit, data, quiet


class Slow(nn.Linear):
    """An emulated layer: it sleeps for its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return super().forward(x)


class LitSlow(Lit):
    def __init__(self) -> None:
        super().__init__(layers=1)
        self.model = nn.Sequential(Slow(6, 6), Slow(6, 3))


class LitUneven(Lit):
    """Three layers of known bytes."""

    def __init__(self) -> None:
        super().__init__(layers=1, optimizer="adamw")
        self.model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def fit(module: pl.LightningModule, strategy: PipelineStrategy, ranks: int, **options: Any) -> pl.Trainer:
    quiet()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        precision="64-true",
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"logger": False, "max_epochs": 2, **options},
    )
    trainer.fit(module, DataLoader(data(), batch_size=8))
    return trainer


def measured(rank: int, folder: str) -> dict[str, Any]:
    strategy = PipelineStrategy("gpipe", microbatches=4)
    fit(LitSlow(), strategy, 2)
    report = strategy.report
    saved = report.save(Path(folder) / str(rank))
    loaded = RunRecord.load(saved.record)
    assert "makespan" in str(report)
    uneven = PipelineStrategy("1f1b", microbatches=2, partition=[1])
    fit(LitUneven(), uneven, 2)
    return {
        "numbers": [
            report.bubble_measured,
            report.bubble_predicted,
            report.measured.makespan,
            report.predicted.makespan,
        ],
        "loaded": loaded == report.record and loaded.measured.events == report.measured.events,
        "label": report.record.label,
        "facts": report.record.facts,
        "between": report.record.between,
        "advice": report.advice.sentence,
        "costs": uneven.report.record.costs,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict[str, Any]]:
    return run_ranks(measured, 2, str(folder), timeout=90)


def test_report(ranks, folder):
    first, second = (rank["numbers"] for rank in ranks)
    assert first == second
    bubble, foretold, makespan, expected = first
    assert 0.02 < bubble < 0.8
    assert 0 <= foretold < bubble + 0.2  # what else runs on the machine makes a measured step longer, never shorter
    assert 40_000_000 < expected < 1.4 * makespan
    assert makespan > 4 * 10_000_000  # four micro-batches of 10 ms pass one after the other
    assert (folder / "0" / "timeline.png").stat().st_size > 1000
    assert json.loads((folder / "0" / "timeline.json").read_text())
    assert ranks[0]["loaded"]
    assert ranks[0]["label"] == "gpipe"
    assert ranks[0]["facts"]["module"] == "LitSlow"
    assert 0 < ranks[0]["between"] < 1
    page = (folder / "0" / "report.html").read_text()
    assert escape(ranks[0]["advice"]) in page
    assert "x the time of the other" in ranks[0]["advice"] or "Ranks idle" in ranks[0]["advice"]


def test_bytes_of_stages(ranks):
    """By hand, in float64: 6 x 10 + 10 parameters, then 10 x 3 + 3; AdamW keeps two numbers and a step for each."""
    costs: CostModel = ranks[0]["costs"]
    assert costs.weight_bytes == (8 * 70, 8 * 33)
    assert costs.state_bytes == (8 * 70 * 3 + 2 * 4, 8 * 33 * 3 + 2 * 4)
    assert costs.forward_bytes == costs.backward_bytes == (8 * 10,)
    # Stage 0 keeps nothing: its input lies in the batch, and its result with stage 1. That keeps what came in (10), as
    # tanh needs its result (10), and the last layer's scores (3), of which the loss keeps probabilities (3).
    assert costs.activation_bytes[0] == 0
    assert 8 * (10 + 3) <= costs.activation_bytes[1] <= 8 * (10 + 10 + 3 * 4)


def test_nothing_to_report():
    from lightning_pipes.ir import PlanError
    from lightning_pipes.trainer import PipelineReport

    empty: list[Any] = [[], []]
    with pytest.raises(PlanError, match="no batch was trained"):
        PipelineReport.of(empty)
