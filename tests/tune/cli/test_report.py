"""Tests for `lightning-pipes report`."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_pipes.sim.records.record import RUN_FILE
from lightning_pipes.testing.generators import record_of
from tests.tune.cli.calls import Say, found, refused


class TestReport:
    def test_of_a_run(self, say: Say, tmp_path: Path) -> None:
        record_of([2, 2, 2, 6], 2, 4).save(tmp_path / RUN_FILE)
        text = say("report", str(tmp_path))
        assert text.startswith("Stage 1 takes 2x the time of the other: move layer 2 from stage 1 to stage 0")
        assert "rank 1: bubble" in text
        assert f"page: {tmp_path / 'report.html'}" in text
        got = found(say, "report", str(tmp_path / RUN_FILE), "--out", str(tmp_path / "other.html"))
        assert (got["slowest_stage"], got["page"]) == (1, str(tmp_path / "other.html"))
        assert got["slowest_ratio"] == pytest.approx(2, rel=1e-3)
        assert got["advice"] == text.splitlines()[0]
        assert all(change["call"].startswith("PipelineStrategy(") for change in got["changes"])
        assert "Stage 1 takes 2x" in (tmp_path / "other.html").read_text()

    def test_a_profile_lets_it_try_other_cuts(self, say: Say, tmp_path: Path) -> None:
        record = record_of([2, 2, 2, 6], 2, 4)
        record_of([2, 2, 2, 6], 2, 4, known=False).save(tmp_path / RUN_FILE)
        assert record.profile is not None
        record.profile.save(tmp_path / "p.json")
        before = found(say, "report", str(tmp_path))["advice"]
        after = found(say, "report", str(tmp_path), "--profile", str(tmp_path / "p.json"))["advice"]
        assert "give it less to do" in before
        assert "move layer 2 from stage 1 to stage 0" in after

    def test_mistakes(self, tmp_path: Path, profile: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert refused(capsys, "report", str(tmp_path)).startswith(
            f"there is no run in {tmp_path}: run.json is written"
        )
        record_of([2, 2, 2, 6], 2, 4).save(tmp_path / RUN_FILE)
        said = refused(capsys, "report", str(tmp_path), "--profile", profile)
        assert said.startswith(f"{profile} has 8 layers and the run had 4; profile the model that was run")
