"""The command line: what it prints, what it writes, and how it answers mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_pipes.cost import ModelProfile
from lightning_pipes.ir import Kind
from lightning_pipes.ir.registry import installed_schedules
from lightning_pipes.sim.shown.record import FILE
from lightning_pipes.testing.interpreters import run_environment
from lightning_pipes.testing.records import record_of
from lightning_pipes.tune import schema
from lightning_pipes.tune.cli import main
from lightning_pipes.tune.cli.command import format_table
from lightning_pipes.tune.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
Say = Callable[..., str]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """What a command prints; it must succeed, and say nothing on stderr."""

    def run(*arguments: str) -> str:
        assert main(arguments) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return run


def found(say: Say, *arguments: str) -> dict[str, Any]:
    text = say(*arguments, "--json")
    assert text.count("\n") == 1
    return dict(json.loads(text))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command says that can't be done."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, str)  # the interpreter prints it, and ends with 1
    assert capsys.readouterr().out == ""
    return ended.value.code.strip()


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    made = record_of([2, 2, 2, 6, 4, 2, 4, 2], 2, 4).profile
    assert made is not None
    made.save(path)
    return str(path)


class TestMain:
    def test_help(self, say: Say) -> None:
        assert all(name in say("--help") for name in COMMANDS)

    @pytest.mark.parametrize("arguments", [[], ["plam"], ["report"], ["schedules", "kfkb"]])
    def test_what_makes_no_sense_ends_with_2(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert main(arguments) == 2

    def test_unknown_flags_end_with_2(self) -> None:
        with pytest.raises(SystemExit) as ended:
            main(["plan", "--nonsense"])
        assert ended.value.code == 2

    @pytest.mark.parametrize("name", COMMANDS)
    def test_every_command_has_help_with_examples(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
        out = capsys.readouterr().out
        assert f"  lightning-pipes {name}" in out
        assert "--json" in out
        if name in schema.SCHEMAS:
            assert "settings, with their defaults:" in out

    def test_as_a_process(self) -> None:
        command = [sys.executable, "-m", "lightning_pipes", "simulate", "schedule=kfbk"]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert ended.returncode == 1
        assert "there is no such schedule. Did you mean 'kfkb'?" in ended.stderr
        assert "Traceback" not in ended.stderr

    def test_torch_stays_unloaded(self) -> None:
        code = "import sys, lightning_pipes.tune.cli as c; c.main(['simulate']); print('torch' in sys.modules)"
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
        assert ended.stdout.splitlines()[-1] == "False", ended.stderr


@pytest.mark.parametrize("name", ["plan", "simulate", "profile"])
def test_settings_files_hold_what_the_schema_takes(name: str) -> None:
    written = yaml.safe_load((ROOT / "conf" / f"{name}.yaml").read_text())
    groups = {key for each in written.pop("defaults") if isinstance(each, dict) for key in each}
    assert set(written) | groups == {f.name for f in fields(schema.SCHEMAS[name])}


class TestSchedules:
    def test_all_that_are_installed(self, say: Say) -> None:
        text = say("schedules")
        lines = {
            line.split()[0]: line for line in text.splitlines() if line and line.split()[0] in installed_schedules()
        }
        assert set(lines) == set(installed_schedules())
        assert "stages_per_rank=2" in lines["interleaved"]
        assert "All forwards of a batch, then all backwards in the same order" in lines["gpipe"]

    def test_numbers_are_those_of_the_closed_forms(self, say: Say) -> None:
        by_name = {each["name"]: each for each in found(say, "schedules")["schedules"]}
        p, m = 4, 8
        assert by_name["1f1b"]["bubble"] == pytest.approx((p - 1) / (m + p - 1), abs=1e-4)
        assert by_name["interleaved"]["bubble"] == pytest.approx((p - 1) / 2 / (m + (p - 1) / 2), abs=1e-4)
        assert (by_name["gpipe"]["held"], by_name["1f1b"]["held"]) == (m, p)


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
            (["model=GTP-2"], "there is no model called 'GTP-2'; did you mean 'GPT-2'"),
            (["--png", "/nowhere/at/all.png"], "there is no folder /nowhere/at to write all.png into"),
        ],
    )
    def test_mistakes(self, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert refused(capsys, "simulate", *arguments).startswith(said)


class TestProfile:
    def test_a_module_with_something_before_its_layers(
        self, say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(ROOT)
        out = tmp_path / "p.json"
        told = found(say, "profile", "model=tests.tune.factories:Lit", "rows=[2,6]", "repeats=1", f"out={out}")
        made = ModelProfile.load(out)
        assert [layer.name for layer in made.layers] == ["0 Linear", "1 ReLU", "2 Linear"]
        assert [rows for rows, _ in made.layers[0].forward] == [2, 6]
        assert made.layers[0].weight_bytes == 4 * 72 == told["layers"][0]["weight_bytes"]
        assert made.layers[0].optimizer_bytes == 4 * 72  # SGD with momentum, its own
        assert all(each["forward_seconds"] > 0 for each in told["layers"])

    def test_layers_with_an_example(self, say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(ROOT)
        arguments = ("profile", "model=tests.tune.factories:sequential", "rows=3", "repeats=1", "split=true")
        text = say(*arguments, f"out={tmp_path / 'p.json'}", "optimizer=Adam")
        assert "0 Linear" in text
        assert f"next: lightning-pipes plan profile={tmp_path / 'p.json'}" in text
        made = ModelProfile.load(tmp_path / "p.json")
        assert made.has_split
        assert made.seconds(Kind.W, 0, 3) > 0

    def test_an_example_by_its_name(self, say: Say, tmp_path: Path) -> None:
        settings = ("model=mlp", "data=digits", "model.width=16", "rows=4", "repeats=1")
        told = found(say, "profile", *settings, f"out={tmp_path / 'p.json'}")
        assert len(told["layers"]) == 7

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["model=tests.tune.factories:nothing"], "model=tests.tune.factories:nothing gave a str, not a module"),
            (["model=tests.tune.factories:no_example"], "model=tests.tune.factories:no_example: the input of"),
            (["model=tests.tune.factories:absent"], "model=tests.tune.factories:absent: module"),
            (["model=nowhere.at_all:f"], "model=nowhere.at_all:f: No module named 'nowhere'"),
            (["model=gpt", "data=digits"], "model=gpt can't read data=digits: use data=stdlib"),
            (["model=tests.tune.factories:Lit", "device=gpu9"], "device=gpu9 can't be used here:"),
            (["model=tests.tune.factories:Lit", "optimizer=Adm"], "optimizer=Adm: torch.optim has no such optimizer"),
            (["model=tests.tune.factories:Lit", "rows=[0]"], "rows=[0]: needs a number from 1 to"),
            (["out=/nowhere/p.json"], "there is no folder /nowhere"),
        ],
    )
    def test_mistakes(
        self, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(ROOT)
        given = [*arguments] if any(a.startswith("out=") for a in arguments) else [*arguments, "out=/tmp/never.json"]
        assert refused(capsys, "profile", *given).startswith(said)


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


class TestStages:
    MODEL = ("stages", "model=BERT-48", "device=A100-40G", "ranks=8", "batch=32")

    def test_few_batches_want_many_stages_and_staleness_few(self, say: Say) -> None:
        """By seconds alone four stages are best; with batches that grow by staleness, fewer."""
        alone, stale = found(say, *self.MODEL), found(say, *self.MODEL, "--batches", "1:196,4:1960")
        by_stages = {each["stages"]: each for each in alone["options"]}
        timed = [n for n, each in by_stages.items() if each["seconds"] is not None]
        assert alone["stages"] == min(timed, key=lambda n: by_stages[n]["seconds_a_batch"])
        assert stale["stages"] < alone["stages"]
        assert f"data_parallel={8 // stale['stages']}" in stale["strategy"]

    def test_theory_ends_where_staleness_never_reaches_the_target(self, say: Say) -> None:
        theory = "loss=10,lipschitz=5,noise=0.04,lr=0.01,target=0.1"
        options = found(say, *self.MODEL, "--theory", theory)["options"]
        assert options[-1]["batches"] is None
        assert options[0]["batches"] == pytest.approx(20040, abs=1)
        assert "gradients so stale never reach the target" in say(*self.MODEL, "--theory", theory)

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["ranks=4"], "stages needs layers: profile=FILE"),
            (["model=BERT-48", "--batches", "3"], "--batches '3': give stages:batches pairs"),
            (["model=BERT-48", "--theory", "loss=1"], "--theory 'loss=1': give loss, lipschitz"),
            (["model=BERT-48", "microbatches=[2,4]"], "microbatches=[2, 4]: stages takes one number"),
            (["model=BERT-48", "--batches", "1:2"], "T(S) is fitted to the batches of runs on two numbers"),
        ],
    )
    def test_mistakes(self, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert refused(capsys, "stages", *arguments).startswith(said)


class TestReport:
    def test_of_a_run(self, say: Say, tmp_path: Path) -> None:
        record_of([2, 2, 2, 6], 2, 4).save(tmp_path / FILE)
        text = say("report", str(tmp_path))
        assert text.startswith("Stage 1 takes 2x the time of the other: move layer 2 from stage 1 to stage 0")
        assert "rank 1: bubble" in text
        assert f"page: {tmp_path / 'report.html'}" in text
        got = found(say, "report", str(tmp_path / FILE), "--out", str(tmp_path / "other.html"))
        assert (got["slowest_stage"], got["page"]) == (1, str(tmp_path / "other.html"))
        assert got["slowest_ratio"] == pytest.approx(2, rel=1e-3)
        assert got["advice"] == text.splitlines()[0]
        assert all(change["call"].startswith("PipelineStrategy(") for change in got["changes"])
        assert "Stage 1 takes 2x" in (tmp_path / "other.html").read_text()

    def test_a_profile_lets_it_try_other_cuts(self, say: Say, tmp_path: Path) -> None:
        record = record_of([2, 2, 2, 6], 2, 4)
        record_of([2, 2, 2, 6], 2, 4, known=False).save(tmp_path / FILE)
        assert record.profile is not None
        record.profile.save(tmp_path / "p.json")
        before = found(say, "report", str(tmp_path))["advice"]
        after = found(say, "report", str(tmp_path), "--profile", str(tmp_path / "p.json"))["advice"]
        assert "give it less to do" in before
        assert "move layer 2 from stage 1 to stage 0" in after

    def test_mistakes(self, tmp_path: Path, profile: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert refused(capsys, "report", str(tmp_path)).startswith(f"there is no run in {tmp_path}: a run leaves")
        record_of([2, 2, 2, 6], 2, 4).save(tmp_path / FILE)
        said = refused(capsys, "report", str(tmp_path), "--profile", profile)
        assert said.startswith(f"{profile} has 8 layers and the run had 4; profile the model that was run")


def test_tables_line_up() -> None:
    text = format_table([{"name": "a", "n": "1"}, {"name": "long", "n": "10"}])
    assert text.splitlines() == ["name   n", "a      1", "long  10"]
    assert format_table([]) == ""


SCRIPT = """
import sys
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from lightning_pipes import PipelineStrategy

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        if "--mean" in sys.argv:
            x = x - x.mean(0)
        return self.layers(x).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    pl.seed_everything(1)
    strategy = PipelineStrategy(partition="parameters", microbatches=2)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=9, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8))
    print("steps", trainer.global_step)
"""


def test_verify_runs_a_script_as_it_is(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(os, "environ", run_environment("verify", tmp_path))  # Trainers of other tests leave LOCAL_RANK
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert main(["verify", "--batches", "3", str(script), "--json", "key=value"]) == 0
    said = capfd.readouterr().out
    assert "PipelineStrategy(verify=3): equal to one process over 3 batches" in said
    assert "steps 3" in said
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(script), "--mean"])
    assert ended.value.code == 1
    assert "First differs what goes into layer 0" in capfd.readouterr().out


def test_verify_refuses_what_trains_nothing(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print('nothing')")
    for words, error in (
        (["verify", str(script)], "has trained no batch"),
        (["verify", str(tmp_path / "none.py")], "there is no such script"),
        (["verify", "--batches", "none", str(script)], "--batches"),
    ):
        with pytest.raises(SystemExit, match=error):
            main(words)
