"""`lightning-pipes plan`."""

from __future__ import annotations

from pathlib import Path

import pytest

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
        assert "the best" in text
        assert got["step_seconds"] == min(o["step_ms"] for o in got["options"] if "step_ms" in o) / 1e3
        assert "Pipeline plan: " in page.read_text()

    @pytest.mark.parametrize("schedule", [("schedule=kfkb", "schedule.k=2"), ("schedule=dynpipe",)])
    def test_it_can_be_followed(self, schedule: tuple[str, ...], say: Say, profile: str) -> None:
        """Simulated with what the plan says, a step takes what the plan says."""
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
        arguments = ("plan", f"profile={profile}", "ranks=2", "batch=16", "microbatches=4", "schedule=1f1b")
        one = found(say, *arguments, "bandwidth=1GB/s")
        four = found(say, *arguments, "bandwidth=1GB/s", "replicas=4")
        gradients = max(len(names) for names in four["layers"]) * 4 * 2**20
        assert four["all_reduce_seconds"] == pytest.approx(2 * 3 / 4 * gradients / 1e9)
        assert four["step_seconds"] == pytest.approx(one["step_seconds"] + four["all_reduce_seconds"])
        assert four["strategy"].endswith("data_parallel=4)")

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
                "160 devices are needed and the cluster has 64; set clus",
            ),
            (
                ["model=GPT-2", "cluster=local", "bandwidth=1GB/s"],
                "bandwidth and latency are for one host; with a cluste",
            ),
            (["model=GPT-2", "microbatches=[0]"], "microbatches=[0]: needs a number from 1 to"),
            (["model=GPT-2", "cluster=dgx"], "cluster=dgx: there is no such cluster. There is: dgx_a100"),
            (["model=GPT-2", "profile=a.json"], "profile=a.json and model=GPT-2: give one of them"),
        ],
    )
    def test_mistakes(self, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert refused(capsys, "plan", *arguments).startswith(said)
