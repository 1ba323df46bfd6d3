"""Tests for the display of a running array."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tqdm import tqdm

from lightning_pipes.arrays.array_display import ArrayDisplay


def trainer(batch: int, **more: Any) -> Any:
    """Return a stand-in for a Trainer that has trained `batch` batches."""
    return SimpleNamespace(
        num_training_batches=more.get("num_training_batches", 10),
        max_epochs=more.get("max_epochs", 2),
        max_steps=more.get("max_steps", -1),
        accumulate_grad_batches=more.get("accumulate_grad_batches", 1),
        fit_loop=SimpleNamespace(total_batch_idx=batch),
        current_epoch=batch // 10,
        progress_bar_metrics={"loss": 0.5},
    )


def test_a_line_for_each_sibling(capsys: pytest.CaptureFixture[str]) -> None:
    display = ArrayDisplay(shown=True)
    for sibling in (0, 1):
        display.update_sibling(sibling, trainer(13))
    display.end_sibling(0, counts=True)
    display.update_sibling(2, trainer(0))  # takes the free line
    display.close()
    text = capsys.readouterr().err
    for part in ("sibling 0, epoch 1", "sibling 1, epoch 1", "sibling 2, epoch 0", "14/20", "loss=0.5", "1 ended"):
        assert part in text


def test_lines_are_below_the_progress_bar_of_a_study(capsys: pytest.CaptureFixture[str]) -> None:
    """Check that each bar has its own line. tqdm stores the number of the line with a negative sign."""
    with tqdm(total=3) as bar:
        display = ArrayDisplay(shown=True)
        for sibling in (0, 1):
            display.update_sibling(sibling, trainer(13))
        assert sorted(abs(each.pos) for each in (bar, display._whole, *display._bars.values())) == [0, 1, 2, 3]
        display.close()


def test_nothing_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    """Check that a hidden display writes nothing."""
    display = ArrayDisplay(shown=False)
    display.update_sibling(0, trainer(1))
    display.end_sibling(0, counts=True)
    display.close()
    assert capsys.readouterr().err == ""


def test_endless_data_have_no_total(capsys: pytest.CaptureFixture[str]) -> None:
    display = ArrayDisplay(shown=True)
    endless = trainer(3, num_training_batches=float("inf"))
    display.update_sibling(0, endless)
    display.update_sibling(1, None)
    display.close()
    assert "4batch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "total"), [({"max_epochs": -1, "max_steps": 3, "accumulate_grad_batches": 4}, 12), ({"max_steps": 15}, 15)]
)
def test_total_equals_the_run(more: dict[str, int], total: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that the total is correct even after a sanity check, during which Lightning cannot compute it."""
    display = ArrayDisplay(shown=True)
    display.update_sibling(0, trainer(-1, num_training_batches=float("inf")))
    display._drawn.clear()
    display.update_sibling(0, trainer(5, **more))
    display.close()
    assert f"6/{total}" in capsys.readouterr().err


def test_idle_sibling_has_not_ended(capsys: pytest.CaptureFixture[str]) -> None:
    """Check that siblings that do not count are missing from the number of ended siblings."""
    display = ArrayDisplay(shown=True)
    display.end_sibling(0, counts=True)
    display.end_sibling(1, counts=False)
    display.close()
    text = capsys.readouterr().err
    assert "1 ended" in text
    assert "2 ended" not in text
