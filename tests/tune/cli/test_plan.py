"""Tests for `lightning-pipes plan`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_pipes.tune.cli.plan import _draw_pieces
from tests.tune.cli.calls import Say, found, refused


class TestPlan:
    def test_of_a_profile(self, say: Say, profile: str, tmp_path: Path) -> None:
        page = tmp_path / "plan.html"
        text = say("plan", f"profile={profile}", "ranks=2", "batch=16", "--html", str(page))
        got = found(say, "plan", f"profile={profile}", "ranks=2", "batch=16")
        assert got["strategy"] in text
        assert got["overrides"] in text
        assert got["strategy"].startswith(f'PipelineStrategy("{got["schedule"]}", microbatches={got["microbatches"]}')
        assert [name for stage in got["layers"] for name in stage] == [f"{n} Block" for n in range(8)]
        assert "chosen" in text
        assert got["step_seconds"] == min(o["step_ms"] for o in got["options"] if "step_ms" in o) / 1e3
        assert "Pipeline plan: " in page.read_text()

    @pytest.mark.parametrize("schedule", [("schedule=kfkb", "schedule.k=2"), ("schedule=dynpipe",)])
    def test_it_can_be_followed(self, schedule: tuple[str, ...], say: Say, profile: str) -> None:
        """Check that a simulation with the settings of a plan has the step time of this plan."""
        got = found(say, "plan", f"profile={profile}", "ranks=2", "batch=16", *schedule)
        cuts = str(got["partition"]).replace(" ", "")
        again = found(
            say,
            *("simulate", f"profile={profile}", "ranks=2", "batch=16", *schedule),
            *(f"microbatches={got['microbatches']}", f"partition={cuts}", f"recompute={got['recompute']}"),
        )
        assert again["step_seconds"] == pytest.approx(got["step_seconds"], rel=1e-6)
        assert again["bubble"] == pytest.approx(got["bubble"])

    def test_replicas_add_their_ring(self, say: Say, profile: str) -> None:
        """Check that the time of a step includes the all-reduce of the replicas."""
        arguments = ("plan", f"profile={profile}", "ranks=2", "batch=16", "microbatches=4", "schedule=1f1b")
        one = found(say, *arguments, "bandwidth=1GB/s")
        four = found(say, *arguments, "bandwidth=1GB/s", "replicas=4")
        gradients = max(len(names) for names in four["layers"]) * 4 * 2**20
        assert four["all_reduce_seconds"] == pytest.approx(2 * 3 / 4 * gradients / 1e9)
        assert four["step_seconds"] == pytest.approx(one["step_seconds"] + four["all_reduce_seconds"])
        assert four["strategy"].endswith("data_parallel=4)")

    def test_stale_gradients_come_into_question_where_they_are_allowed(self, say: Say, profile: str) -> None:
        """Check that plans use stale gradients only if they are allowed and save time."""
        arguments = ("plan", f"profile={profile}", "ranks=2", "batch=16", "microbatches=4")
        exact = found(say, *arguments)
        stale = found(say, *arguments, "stale_gradients=true")
        weighed = found(say, *arguments, "stale_gradients={1: 100, 2: 400}")
        assert stale["schedule"] == "pipedream"
        assert stale["step_seconds"] < exact["step_seconds"] == weighed["step_seconds"]

    def test_a_model_by_name_on_a_cluster(self, say: Say) -> None:
        model = ("plan", "model=GPT-2", "device=V100-16G", "dtype=float16", "schedule=1f1b", "recompute=false")
        got = found(say, *model, "ranks=4", "batch=16", "microbatches=8", "cluster=v100_ethernet", "replicas=2")
        assert got["samples_per_second"] > 0
        assert max(got["peak_bytes"]) < 14 * 2**30

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ([], "plan needs layers: profile=FILE from lightning-pipes profile, or model=NAME by formula"),
            (["model=GPT-2", "memory=100MiB"], "no schedule fits: stage"),
            (["model=GPT-2", "memory=lots"], "memory: 'lots' is not a size; write it as 16GiB"),
            (
                ["model=GPT-2", "cluster=dgx_a100", "replicas=40"],
                "160 devices are needed, but the cluster has 64; set clus",
            ),
            (
                ["model=GPT-2", "cluster=local", "bandwidth=1GB/s"],
                "bandwidth and latency are for one host; with a cluste",
            ),
            (["model=GPT-2", "schedule=1f1b", "stale_gradients=true"], "stale_gradients=True is for schedule=auto"),
            (
                ["model=GPT-2", "stale_gradients={1: 5}"],
                "T(S) is fitted to the batches of runs with at least two numbers",
            ),
            (["model=GPT-2", "microbatches=[0]"], "microbatches=[0]: needs a number from 1 to"),
            (["model=GPT-2", "cluster=dgx"], "cluster=dgx: there is no such cluster. Choose from: dgx_a100"),
            (["model=GPT-2", "profile=a.json"], "profile=a.json and model=GPT-2: give only one of them"),
        ],
    )
    def test_mistakes(self, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert refused(capsys, "plan", *arguments).startswith(said)


class TestPlanOfAScript:
    """Tests with a script that writes the same file as a training."""

    def test_borders_are_drawn_between_the_units_of_two_stages(self, say: Say, tmp_path: Path) -> None:
        script = tmp_path / "train.py"
        script.write_text(
            "import json, os, sys\n"
            "names = ['net.first.a', 'net.first.b', 'net.second.a', 'relu']\n"
            "def row(n):\n"
            "    return dict(stage=n // 2, name=names[n], seconds=n / 1e3, share=n / 6, bytes=[None, 4096][n == 2])\n"
            "json.dump([row(n) for n in range(4)] * int(sys.argv[1]), open(os.environ['LIGHTNING_PIPES_PLAN'], 'w'))\n"
        )
        lines = say("plan", str(script), "1").strip().splitlines()
        assert [line.split()[:3] for line in lines[1:]] == [
            ["0", "0", "net.first.a"],
            ["0", "1", "net.first.b"],
            ["----", "4", "KiB"],
            ["1", "2", "net.second.a"],
            ["1", "3", "relu"],
        ]
        assert ("2 ms" in lines[4], "33.3%" in lines[4], lines[4].count("#")) == (True, True, 16)
        assert len(json.loads(say("plan", "--json", str(script), "2"))["pieces"]) == 8

    def test_units_of_one_module_are_a_line_where_there_are_many(self) -> None:
        pieces = [
            {
                "stage": n // 60,
                "name": f"net.{n // 20}.{n}",
                "seconds": 1e-3,
                "share": 0.01,
                "bytes": 8 if n == 60 else None,
            }
            for n in range(100)
        ]
        lines = _draw_pieces(pieces)
        assert [line["units"] for line in lines] == ["0-19", "20-39", "40-59", "", "60-79", "80-99"]
        assert lines[0]["name"] == "net.0..."
        assert [line["share"] for line in lines if line["stage"]] == ["20.0%"] * 5

    def test_scripts_that_can_not_be_drawn(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        script = tmp_path / "train.py"
        script.write_text("")
        assert "did not cut a module" in refused(capsys, "plan", str(script))
        assert "there is no such script" in refused(capsys, "plan", str(tmp_path / "none.py"))
        assert "ranks=2 is for a plan from a profile" in refused(capsys, "plan", "ranks=2", str(script))
