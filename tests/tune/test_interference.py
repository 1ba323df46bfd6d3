"""Tests for the times of stages next to competing processes, and for predictors trained from these times."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest

from lightning_pipes.planning.replanning import NO_NEIGHBOR, HostedStage
from lightning_pipes.strategies.dynpipe import DynPipe
from lightning_pipes.strategies.dynpipe.interference import Predictor
from lightning_pipes.strategies.dynpipe.interference.dataset import Dataset
from lightning_pipes.strategies.dynpipe.interference.features import RUN_SHARE_METRIC, WAIT_SHARE_METRIC
from lightning_pipes.tune import interference
from lightning_pipes.tune.cli import main
from lightning_pipes.tune.interference import Background, NeighbourWindow
from lightning_pipes.tune.neighbors import Neighbor
from tests.virtual_clock import VirtualClock

STAGE = HostedStage(1, 8, 0.01, 0.02, 1e6, 1e6, 1e5, 1e4)


def made_windows() -> list[NeighbourWindow]:
    """Return windows with three kinds of neighbours. Steps take a tenth longer than the formula predicts."""
    rng = np.random.default_rng(0)
    found = []
    for setting in range(12):
        kind = ("spin", "memory", NO_NEIGHBOR)[setting % 3]
        wait = 0.0 if kind == NO_NEIGHBOR else float(rng.uniform(0.2, 1.0))
        found += [
            NeighbourWindow(
                {RUN_SHARE_METRIC: 1.0, WAIT_SHARE_METRIC: wait}, STAGE, 1.1 * (1 + wait), kind, "mlp", setting
            )
        ] * 4
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="neighbours are pinned by Linux")
def test_windows_are_measured_next_to_a_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that slow windows are found if a neighbour takes half of the core.

    Only stages advance the clock.
    """
    core, clock, took, step = max(os.sched_getaffinity(0)), VirtualClock(), [0.01], interference.TimedStage.step

    @contextmanager
    def crowded() -> Iterator[None]:
        with Neighbor("spin", core=core):
            took[0] = 0.02
            yield
        took[0] = 0.01

    def timed(stage: interference.TimedStage) -> tuple[float, float]:
        assert step(stage) == (0.0, 0.0)
        clock.sleep(took[0])
        return took[0] / 3, took[0]

    clock.patch(monkeypatch)
    monkeypatch.setattr(interference.TimedStage, "step", timed)
    beside = [Background("spin", crowded), Background(NO_NEIGHBOR, nullcontext)]
    monkeypatch.setattr(interference, "settings", lambda *_: beside)
    monkeypatch.setattr(interference, "N_PASSES", 2)
    told: list[float] = []
    windows = interference.collect_windows(True, 0.05, lambda text, done: told.append(done))
    assert len(windows) == 2 * 5 * 2  # surroundings, kinds of stages, halves
    assert {window.kind for window in windows} == {"mlp", "attention", "convolution", "embedding", "elementwise"}
    assert [w.ratio for w in windows] == pytest.approx([2.0 if w.neighbour == "spin" else 1.0 for w in windows])
    assert all(w.stage.backward == pytest.approx(0.02 / 3) for w in windows)
    assert told[0] == 0.0


def test_a_predictor_learns_from_windows(tmp_path: Path) -> None:
    """Check that a predictor trained from windows is more accurate than the formula."""
    data = tmp_path / "data.npz"
    first = DynPipe.score_predictor(made_windows(), data)
    assert first["windows"] == 48
    beside = [window.ratio for window in made_windows() if window.neighbour != NO_NEIGHBOR]
    assert first["formula_mae"] == pytest.approx(np.mean(beside) * 0.1 / 1.1)
    assert first["forest_mae"] < first["formula_mae"] / 2
    ratio = (
        Dataset.load(data)
        .train_predictor()
        .predict([({RUN_SHARE_METRIC: 1.0, WAIT_SHARE_METRIC: 0.5}, STAGE)])
        .ratios[0]
    )
    assert ratio == pytest.approx(1.1 * 1.5, rel=0.05)
    assert DynPipe.score_predictor(None, data) == first


class TestCommand:
    def test_measures_and_writes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
        monkeypatch.setattr(interference, "collect_windows", lambda quick, seconds, told: made_windows())
        data = tmp_path / "data.npz"
        assert main(["interference", "--data", str(data)]) == 0
        assert "48 windows" in capsys.readouterr().out
        assert data.exists()
        monkeypatch.delattr(interference, "collect_windows")  # now they come from the file
        assert main(["interference", "--data", str(data), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["file"], found["windows"]) == (str(data), 48)
        assert isinstance(DynPipe(predictor=str(data)).make_planner().predictor, Predictor)

    def test_a_folder_that_is_missing_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(SystemExit, match="there is no folder"):
            main(["interference", "--data", str(tmp_path / "no" / "data.npz")])
