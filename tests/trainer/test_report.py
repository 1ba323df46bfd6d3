"""What a run did, against what the simulator foretells."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
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


def measured(rank: int, folder: str) -> list[float]:
    quiet()
    strategy = PipelineStrategy("gpipe", microbatches=4)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=2,
        precision="64-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LitSlow(), DataLoader(data(), batch_size=8))
    report = strategy.report
    report.save(Path(folder) / str(rank))
    assert "makespan" in str(report)
    return [report.bubble_measured, report.bubble_predicted, report.measured.makespan, report.predicted.makespan]


def test_report(tmp_path):
    ranks = run_ranks(measured, 2, str(tmp_path), timeout=40)
    assert ranks[0] == ranks[1]
    bubble, foretold, makespan, expected = ranks[0]
    assert 0.02 < bubble < 0.6
    assert foretold == pytest.approx(bubble, abs=0.2)
    assert expected == pytest.approx(makespan, rel=0.4)
    assert makespan > 4 * 10_000_000  # four micro-batches of 10 ms pass one after the other
    assert (tmp_path / "0" / "timeline.png").stat().st_size > 1000
    assert json.loads((tmp_path / "0" / "timeline.json").read_text())


def test_nothing_to_report():
    from lightning_pipes.ir import PlanError
    from lightning_pipes.trainer import PipelineReport

    empty: list[Any] = [[], []]
    with pytest.raises(PlanError, match="no batch was trained"):
        PipelineReport.of(empty)
