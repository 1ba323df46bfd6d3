"""Tests for `lightning-pipes simulate`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tune.cli.calls import Say, found, refused


class TestSimulate:
    def test_the_closed_form(self, say: Say) -> None:
        got = found(say, "simulate", "schedule=gpipe", "ranks=3", "microbatches=5", "forward=2ms", "backward=5ms")
        assert got["step_seconds"] == pytest.approx((5 + 3 - 1) * 7e-3)
        assert got["most_microbatches_held"] == [5, 5, 5]
        text = say("simulate", "schedule=gpipe", "ranks=3", "microbatches=5", "forward=2ms", "backward=5ms")
        assert "gpipe: step 49 ms, bubble 28.6%" in text
        assert text.count("|") == 2 * 3

    def test_a_rank_with_several_stages_takes_no_longer(self, say: Say) -> None:
        got = found(say, "simulate", "schedule=interleaved", "ranks=2", "microbatches=4")
        assert got["step_seconds"] == pytest.approx(4 * 30e-3 + 30e-3 / 2)

    def test_unequal_ranks_links_and_memory(self, say: Say) -> None:
        got = found(
            say,
            *("simulate", "ranks=2", "microbatches=1", "forward=[1ms,2ms]", "backward=3ms", "message=1MB"),
            *("bandwidth=1GB/s", "latency=2ms", "activations=3MiB", "weights=1MiB"),
        )
        assert got["step_seconds"] == pytest.approx(1e-3 + 2e-3 + 2 * 3e-3 + 2 * (1e-3 + 2e-3))
        assert got["peak_bytes"] == [4 * 2**20] * 2

    def test_recomputation_with_times_from_the_command_line(self, say: Say) -> None:
        """Of two ranks, the first one recomputes. Its gradients arrive at 11 and 16 ms.

        It makes the first forward again before 11 ms, or delays its first backward with `late`. It makes the second one
        again between its backwards.
        """
        words = ["simulate", "schedule=gpipe", "ranks=2", "microbatches=2", "forward=2ms", "backward=5ms"]
        words += ["activations=4MiB", "message=1MiB"]
        steps, peaks = {}, {}
        for setting in ("false", "true", "late"):
            got = found(say, *words, f"recompute={setting}")
            steps[setting], peaks[setting] = got["step_seconds"], got["peak_bytes"]
        assert steps == pytest.approx({"false": 21e-3, "true": 23e-3, "late": 25e-3})
        assert peaks["false"] == [8 * 2**20] * 2
        assert peaks["true"] == [4 * 2**20, 8 * 2**20]

    def test_of_a_profile(self, say: Say, profile: str) -> None:
        best = found(say, "simulate", f"profile={profile}", "ranks=2", "batch=16", "microbatches=4")
        worse = found(say, "simulate", f"profile={profile}", "ranks=2", "batch=16", "microbatches=4", "partition=[1]")
        assert best["step_seconds"] < worse["step_seconds"]
        assert best["step_seconds"] == pytest.approx((4 + 1) * 3 * 12e-3)  # 24 ms of layers on two ranks

    def test_pictures(self, say: Say, tmp_path: Path) -> None:
        png, page = tmp_path / "a.png", tmp_path / "a.html"
        text = say("simulate", "ranks=2", "microbatches=2", "--png", str(png), "--html", str(page))
        assert f"picture: {png}\npage: {page}" in text
        assert png.read_bytes().startswith(b"\x89PNG")
        assert "Pipeline plan: 1f1b" in page.read_text()

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["forward=3parsecs"], "forward: '3parsecs' is not a time"),
            (["forward=[1ms,2ms]"], "forward lists 2 times for 4 ranks"),
            (["latency=fast"], "latency: 'fast' is not a time"),
            (["mikrobatches=3"], "mikrobatches: the configuration has no 'mikrobatches'. Did you mean 'microbatches'?"),
            (["ranks=two"], "ranks=two: needs int, as in ranks=4"),
            (["schedule.k=2"], "schedule.k: schedule has no 'k'"),
            (["schedule=kfkb", "schedule.k=0"], "schedule: kfkb: k must be at least 1, got 0"),
            (["profile=none.json"], "there is no file none.json; `lightning-pipes profile out=none.json` writes one"),
            (["model=profile.json"], "model=profile.json looks like a file; use profile=profile.json"),
            (["model=GTP-2"], "there is no model called 'GTP-2'. Did you mean 'GPT-2'"),
            (["--png", "/nowhere/at/all.png"], "there is no folder /nowhere/at to write all.png into"),
        ],
    )
    def test_mistakes(self, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert refused(capsys, "simulate", *arguments).startswith(said)
