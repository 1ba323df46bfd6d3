"""What is shown of an array while it runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_pipes.trainer.array_display import ArrayDisplay


def trainer(batch: int) -> Any:
    return SimpleNamespace(
        num_training_batches=10,
        max_epochs=2,
        fit_loop=SimpleNamespace(total_batch_idx=batch),
        current_epoch=batch // 10,
        progress_bar_metrics={"loss": 0.5},
    )


def test_a_line_for_each_sibling(capsys: pytest.CaptureFixture[str]) -> None:
    display = ArrayDisplay(shown=True)
    for sibling in (0, 1):
        display.after_turn(sibling, trainer(13))
    display.ended(0)
    display.after_turn(2, trainer(0))  # takes the free line
    display.close()
    text = capsys.readouterr().err
    for part in ("sibling 0, epoch 1", "sibling 1, epoch 1", "sibling 2, epoch 0", "14/20", "loss=0.5", "1 ended"):
        assert part in text


def test_nothing_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    display = ArrayDisplay(shown=False)
    display.after_turn(0, trainer(1))
    display.ended(0)
    display.close()
    assert capsys.readouterr().err == ""


def test_endless_data_have_no_total(capsys: pytest.CaptureFixture[str]) -> None:
    display = ArrayDisplay(shown=True)
    endless = trainer(3)
    endless.num_training_batches = float("inf")
    display.after_turn(0, endless)
    display.after_turn(1, None)
    display.close()
    assert "4batch" in capsys.readouterr().err
