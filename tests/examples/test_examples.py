"""Run shortened versions of the examples.

Most of the examples that run in separate interpreters take ten seconds and are marked slow.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch

from lightning_pipes.sim.records.record import RunRecord
from lightning_pipes.testing.ranks import scale_timeout
from tests.launch.example import ROOT, run_in_ranks

SLOW = pytest.mark.slow
SHORT = {
    "gpt": ["model.width=16", "model.blocks=2", "data.context=16", "data.windows=24", "data.batch_size=8"],
    "mlp": ["data=digits", "model.width=16", "trainer.limit_train_batches=4", "trainer.limit_val_batches=2"],
    "resnet_digits": [
        "data=digits",
        "model.channels=4",
        "trainer.limit_train_batches=4",
        "trainer.limit_val_batches=2",
    ],
}


def run(script: str, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script as users do; Lightning starts the other ranks."""
    env = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS")}
    command = [sys.executable, str(ROOT / "examples" / script), *arguments]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=scale_timeout(120))


def train(cwd: Path, model: str, *overrides: str, by: Any = run) -> subprocess.CompletedProcess[str]:
    short = [f"model={model}", *SHORT[model], "pipeline.microbatches=4", "hydra.run.dir=out"]
    return by("train.py", cwd, *short, *overrides)  # type: ignore[no-any-return]


def check_output(found: subprocess.CompletedProcess[str], out: Path) -> None:
    assert found.returncode == 0, found.stdout + found.stderr
    said = dict(re.findall(r"^(loss|tokens/s|images/s|bubble|checkpoint|timeline) +(.+)$", found.stdout, re.M))
    assert len(said) == 5, found.stdout
    assert found.stdout.count("\nloss ") + found.stdout.startswith("loss ") == 1  # rank 0 only
    checkpoint, timeline = Path(said["checkpoint"]), Path(said["timeline"])
    assert (checkpoint.parent, timeline.parent) == (out / "checkpoints", out)
    assert torch.load(checkpoint, weights_only=False)["state_dict"]
    assert timeline.read_bytes().startswith(b"\x89PNG")
    assert "val_loss" in (out / "metrics" / "metrics.csv").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "mlp", "resnet_digits"])
def test_one_stage(model: str, tmp_path: Path) -> None:
    check_output(train(tmp_path, model, "trainer.devices=1"), tmp_path / "out")


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        ("gpt", ["trainer.enable_progress_bar=false"]),
        pytest.param("resnet_digits", ["schedule=interleaved"], marks=SLOW),
        pytest.param("mlp", ["schedule=gpipe", "pipeline.partition=[3]", "pipeline.recompute=true"], marks=SLOW),
    ],
)
def test_pipeline(model: str, overrides: list[str], tmp_path: Path) -> None:
    check_output(train(tmp_path, model, *overrides), tmp_path / "out")
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {"out"}  # child processes write only into the same directory
    assert len([*(tmp_path / "out").rglob("*.ckpt")]) == 2  # the best and the last
    assert {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()} == {".hydra", "checkpoints", "metrics"}


SYSTEMS = [
    pytest.param("kfkb", ["schedule.k=auto"], marks=SLOW),
    pytest.param("jap", ["pipeline.microbatches=null"], marks=SLOW),
    pytest.param("umpipe", [], marks=SLOW),
    pytest.param("csp", [], marks=SLOW),
    ("dynpipe", ["schedule.every=4"]),
    pytest.param("auto", ["pipeline.microbatches=null"], marks=SLOW),
]


@pytest.mark.parametrize(("schedule", "overrides"), SYSTEMS)
def test_every_system(schedule: str, overrides: list[str], tmp_path: Path) -> None:
    """Check that all five systems and the choice among schedules train the same model and write the same files.

    The schedule is selected by its name.
    """
    check_output(train(tmp_path, "gpt", f"schedule={schedule}", *overrides, by=run_in_ranks), tmp_path / "out")
    record = RunRecord.load(tmp_path / "out")
    assert record.plan.n_stages == 2
    assert record.measured is not None
    # the choice may split backwards, like other schedules
    chooses = schedule == "auto" or "schedule.k=auto" in overrides
    assert chooses or record.schedule == schedule


def test_minimal(tmp_path: Path) -> None:
    found = run_in_ranks("minimal.py", tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    loss = re.search(r"^loss (\S+), bubble \d+%$", found.stdout, re.M)
    assert loss is not None
    assert float(loss[1]) < 1.0  # 2.3 is chance, and after one epoch it is 1.2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "most", "options"),
    [("resnet", 1.0, ["--trials", "8", "--storage", "sqlite:///study.db"]), ("gpt", 5.0, ["--windows", "160"])],
)
def test_sweep(model: str, most: float, options: list[str], tmp_path: Path) -> None:
    """Check a search with pruning, the order of its trials and its picture."""
    found = run("sweep.py", tmp_path, "--model", model, "--epochs", "2", "--out", "out", *options)
    assert found.returncode == 0, found.stdout + found.stderr
    states = re.findall(r"^ +(\d+) (COMPLETE|PRUNED) ", found.stdout, re.M)
    assert [int(number) for number, _ in states] == list(range(8 if model == "resnet" else 16))
    assert {state for _, state in states} == {"COMPLETE", "PRUNED"}
    best = re.search(r"^best (\S+) with", found.stdout, re.M)
    assert best is not None
    assert float(best[1]) < most  # chance is 2.3, and 5.5 for the GPT
    assert (tmp_path / "out" / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} <= {"out", "study.db"}


def sweep(cwd: Path, *overrides: str, model: str = "mlp") -> subprocess.CompletedProcess[str]:
    array = ["hydra/launcher=job_array", "hydra.launcher.array_size=2", "hydra.sweep.dir=sweep"]
    return run("train.py", cwd, "-m", f"model={model}", *SHORT[model], *array, *overrides)


@pytest.mark.slow  # tests/tune/test_multirun.py covers the same for smaller modules
def test_multirun(tmp_path: Path) -> None:
    found = sweep(tmp_path, "optimizer.lr=1e-2,1e-3", "data.batch_size=16,32")
    assert found.returncode == 0, found.stdout + found.stderr
    assert {path.name for path in (tmp_path / "sweep").iterdir()} == {*"0123", "multirun.yaml"}
    assert found.stdout.count("\nloss ") == 4
    assert {path.name for path in tmp_path.iterdir()} == {"sweep"}
    for job in "0123":
        assert "val_loss" in (tmp_path / "sweep" / job / "metrics" / "metrics.csv").read_text()
        assert len([*(tmp_path / "sweep" / job / "checkpoints").iterdir()]) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("model", "trials"), [("mlp", 6), ("resnet_digits", 16), ("gpt", 16)])
def test_multirun_by_optuna(model: str, trials: int, tmp_path: Path) -> None:
    search = ["hydra/sweeper=optuna", "hydra/sweeper/pruner=median", "hydra.sweeper.pruner.n_startup_trials=2"]
    space = [f"hydra.sweeper.n_trials={trials}", "optimizer.lr=tag(log,interval(1e-4,1e-1))"]
    few = ["schedule=jap", "pipeline.microbatches=null", "hydra.sweeper.sampler.seed=1", "trainer.max_epochs=2"]
    found = sweep(tmp_path, *search, *space, *few, model=model)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "best_value" in (tmp_path / "sweep" / "optimization_results.yaml").read_text()
    assert re.search(r"Trial \d+ pruned", found.stdout)
    assert {path.name for path in (tmp_path / "sweep").iterdir() if path.is_dir()} == {*map(str, range(trials))}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["schedule.kk=2"], "schedule.kk: schedule has no 'kk'. Did you mean 'k'? Choose from: name, k"),
        pytest.param(["schedule.k=0"], "schedule: kfkb: k must be at least 1, got 0; k=1 is 1F1B", marks=SLOW),
        (["data=digits"], "model=gpt can't read data=digits: choose data=stdlib, or model=mlp or model=resnet_digits"),
        pytest.param(
            ["-m", "seed=1,2"],
            "choose hydra/launcher=job_array, where the runs share one pipeline, or set trainer.devices=1",
            marks=SLOW,
        ),
    ],
)
def test_mistakes_end_in_a_sentence(overrides: list[str], said: str, tmp_path: Path) -> None:
    found = run_in_ranks("train.py", tmp_path, *overrides, ranks=1)
    assert found.returncode == 1
    assert said in found.stderr
    assert "Traceback" not in found.stderr


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


@pytest.mark.usefixtures("examples")
class TestData:
    def test_windows_are_seeded_and_shifted_by_one(self) -> None:
        from data import StdlibText

        a, b, c = (StdlibText(context=8, windows=40, seed=seed) for seed in (0, 0, 1))
        for module in (a, b, c):
            module.setup("fit")
        assert [x.tolist() for x, _ in a.train] == [x.tolist() for x, _ in b.train]  # type: ignore[attr-defined]
        assert a.train.starts != c.train.starts
        x, y = a.train[3]
        assert x.tolist()[1:] == y.tolist()[:-1]
        assert x.shape == y.shape == (8,)

    def test_validation_holds_other_files(self, tmp_path: Path) -> None:
        from data import StdlibText

        for i in range(40):
            (tmp_path / f"{i:02}.py").write_bytes(bytes([i]) * 9)
        (tmp_path / "site-packages").mkdir()
        (tmp_path / "site-packages" / "other.py").write_bytes(bytes([99]) * 9)
        module = StdlibText(context=8, windows=20, root=str(tmp_path))
        module.setup("fit")
        assert module.val.text.unique().tolist() == [0, 20]
        assert module.train.text.unique().tolist() == [i for i in range(40) if i % 20]

    def test_no_source_text(self, tmp_path: Path) -> None:
        from data import StdlibText

        with pytest.raises(FileNotFoundError, match=r"holds 0 Python source files, at least 20 .* choose data=digits"):
            StdlibText(root=str(tmp_path)).setup("fit")

    def test_every_process_shuffles_the_digits_alike(self) -> None:
        from data import Digits

        def epochs(global_seed: int) -> list[list[int]]:
            torch.manual_seed(global_seed)
            module = Digits(seed=3)
            module.setup("fit")
            loader = module.train_dataloader()
            return [[label for _, labels in loader for label in labels.tolist()] for _ in range(2)]

        first, second = epochs(0)
        assert [first, second] == epochs(1)
        assert first != second


@pytest.mark.usefixtures("examples")
def test_gpt_sees_the_past_only() -> None:
    from models import GPT

    model = GPT(context=8, width=16, heads=2, blocks=2).eval()
    x = torch.randint(256, (1, 8))
    changed = x.clone()
    changed[0, 5] += 1
    same = torch.isclose(model(x), model(changed % 256), atol=1e-6).all(-1)[0]
    assert same.tolist() == [True] * 5 + [False] * 3


@pytest.mark.usefixtures("examples")
@pytest.mark.parametrize("model", ["MLP", "ResNetDigits"])
def test_models_learn_on_an_ordinary_trainer(model: str) -> None:
    import data
    import models

    L.seed_everything(0)
    module = getattr(models, model)(lr=3e-3, warmup=10)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data.Digits())
    assert trainer.callback_metrics["val_accuracy"] > 0.9


@pytest.mark.usefixtures("examples")
def test_every_candidate_for_bytes_sees_the_past_only() -> None:
    import supernet

    net = supernet.supernet(16, 6, "frozen", None, context=8).eval()
    x = torch.randint(256, (1, 8))
    changed = x.clone()
    changed[0, 5] += 1
    for first in range(6):  # each block has a different candidate
        choices = tuple((first + block) % 6 for block in range(6))
        a, b = net((x, choices)), net((changed % 256, choices))
        assert torch.isclose(a, b, atol=1e-6).all(-1)[0].tolist() == [True] * 5 + [False] * 3


@pytest.mark.slow
def test_supernet_of_bytes(tmp_path: Path) -> None:
    few = ["search.subnets=5", "search.population=5", "trainer.max_epochs=2", "retrain.epochs=4"]
    found = run("supernet.py", tmp_path, "data=stdlib", "data.windows=640", "hydra.run.dir=out", *few)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "supernet    20 subnets trained, one per batch, of 46656 possible subnets" in found.stdout
    retrained = re.search(r"^retrained +accuracy (\S+)% of", found.stdout, re.M)
    assert retrained is not None
    assert float(retrained[1]) > 20  # 0.4 is chance


@pytest.mark.slow
def test_supernet(tmp_path: Path) -> None:
    """Check the whole example: training, three searches, training of the best subnet from scratch, and the picture."""
    few = ["search.subnets=30", "search.population=10", "trainer.max_epochs=4", "retrain.epochs=6"]
    found = run("supernet.py", tmp_path, "hydra.run.dir=out", *few)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "supernet    92 subnets trained, one per batch, of 46656 possible subnets" in found.stdout
    assert len(re.findall(r"^(?:by chance|evolution|Optuna) +accuracy", found.stdout, re.M)) == 3
    retrained = re.search(r"^retrained +accuracy (\S+)% of", found.stdout, re.M)
    assert retrained is not None
    assert float(retrained[1]) > 80  # 10 is chance
    assert (tmp_path / "out" / "supernet.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


@pytest.mark.usefixtures("examples")
def test_a_supernet_learns_on_an_ordinary_trainer() -> None:
    """Check the module, the stream and the search without a pipeline."""
    import data
    import supernet

    from lightning_pipes.supernets import Evolution, ExplorerFeedback, SubnetStream, Uniform

    L.seed_everything(0)
    digits = data.Digits(64)
    digits.setup("fit")
    net = supernet.supernet(24, 3, "sequential", None)
    stream = SubnetStream(Uniform(net.space))
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=6,
        callbacks=[ExplorerFeedback(stream)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(supernet.TrainedSupernet(net, 3e-3), stream.pair_with(digits.train_dataloader()))
    assert stream.n_reported == trainer.global_step
    images, labels = digits.val.tensors
    settings = SimpleNamespace(subnets=20, price=0.05)
    tried = supernet.search("evolution", Evolution(net.space, 10, 3), net.eval(), images, labels, settings)
    best = max(tried, key=lambda t: t.worth)
    assert best.accuracy > 0.7
    assert best.cost == sum(p.numel() for p in net.extract_subnet(best.choices).parameters())


def check_tutorial(found: subprocess.CompletedProcess[str], out: Path) -> None:
    """Check that the script of a tutorial has saved a picture. It ends with an error if `verify` finds a difference."""
    assert found.returncode == 0, found.stdout + found.stderr
    assert f"picture {out / 'timeline.png'}" in found.stdout
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_from_ddp(tmp_path: Path) -> None:
    out = tmp_path / "out"
    short = ["--width", "16", "--depth", "4", "--epochs", "1", "--out", str(out)]
    found = run_in_ranks("from_ddp.py", tmp_path, "pipeline", "--verify", "2", *short)
    check_tutorial(found, out)


def test_unet(tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = run_in_ranks("unet.py", tmp_path, "--channels", "4", "--epochs", "1", "--out", str(out))
    check_tutorial(found, out)


def test_lora(tmp_path: Path) -> None:
    """Check that rank 0 saves the adapters of all stages."""
    pytest.importorskip("peft")
    from safetensors.torch import load_file

    out = tmp_path / "out"
    short = ["--layers", "2", "--width", "16", "--windows", "96", "--out", str(out)]
    found = run_in_ranks("lora.py", tmp_path, *short)
    check_tutorial(found, out)
    saved = load_file(out / "adapter_model.safetensors")
    assert len(saved) == 2 * 2 * 2  # layers, projections, and the two matrices of each
    assert all(bool(value.any()) for value in saved.values())  # all have been trained


def save_base(folder: Path) -> None:
    """Write a tiny Llama."""
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).save_pretrained(folder)


def check_adapters(base: Path, folder: Path, rank: int) -> None:
    """Check that plain peft reads adapters of this rank from `folder`, and that they have been trained."""
    import peft
    from transformers.models.llama import LlamaForCausalLM

    tuned = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), folder)
    trained = [p for name, p in tuned.named_parameters() if ".lora_B." in name]
    assert trained
    assert all(p.shape[1] == rank and bool(p.any()) for p in trained)


def test_lora_sweep(tmp_path: Path) -> None:
    """Check that plain peft reads the adapters of every trial, which have the ranks that the study has chosen."""
    pytest.importorskip("peft")
    save_base(tmp_path / "base")
    options = ["--trials", "3", "--epochs", "1", "--windows", "96", "--out", "out"]
    found = run_in_ranks("lora_sweep.py", tmp_path, "--base", "base", *options)
    assert found.returncode == 0, found.stdout + found.stderr
    ranks = re.findall(r"^ +\d+ COMPLETE .*'rank': (\d+)", found.stdout, re.M)
    assert len(ranks) == 3
    for number, rank in enumerate(ranks):
        check_adapters(tmp_path / "base", tmp_path / "out" / f"trial_{number}", int(rank))
    assert (tmp_path / "out" / "sweep.png").read_bytes().startswith(b"\x89PNG")


ARRAY = ["-m", "hydra/launcher=job_array", "schedule=jap", "pipeline.microbatches=1", "hydra.sweep.dir=out"]
QUIET = ["trainer.enable_progress_bar=false"]


def test_lora_multirun(tmp_path: Path) -> None:
    """Check that each job of a multirun leaves its adapters in its directory.

    A job whose adapters belong to layers that the base does not have fails alone, and its error names these layers.
    """
    pytest.importorskip("peft")
    save_base(tmp_path / "base")
    sweep = ["model.adapters.r=2,4", "model.adapters.target_modules=[q_proj,v_proj],[nope,q_proj]", "optimizer.lr=1e-2"]
    model = ["model=lora", "model.base=base", "data.windows=96"]
    found = run("train.py", tmp_path, *ARRAY, *QUIET, *model, *sweep)
    assert found.returncode != 0
    assert "The base base has no layers named nope. Choose the target modules of the adapters from" in found.stderr
    assert re.findall(r"^adapters +(\S+)", found.stdout, re.M) == [str(tmp_path / f"out/{n}/adapters") for n in (0, 2)]
    for job, rank in ((0, 2), (2, 4)):
        check_adapters(tmp_path / "base", tmp_path / "out" / str(job) / "adapters", rank)
    assert not [*tmp_path.rglob("*.ckpt")]


@pytest.mark.slow
def test_multirun_over_the_depth_and_the_width(tmp_path: Path) -> None:
    """Check that jobs of one array may have models of different depths and widths, and save these models."""
    model = ["model=mlp", *SHORT["mlp"][:1], *SHORT["mlp"][2:], "model.blocks=2,3", "model.width=8,16"]
    found = run_in_ranks("train.py", tmp_path, *ARRAY, *QUIET, *model)
    assert found.returncode == 0, found.stdout + found.stderr
    for job, (blocks, width) in enumerate([(2, 8), (2, 16), (3, 8), (3, 16)]):
        state = torch.load(tmp_path / "out" / str(job) / "checkpoints" / "last.ckpt", weights_only=False)["state_dict"]
        assert len([name for name in state if name.endswith("weight")]) == blocks + 2
        assert state["layers.1.0.weight"].shape == (width, 64)
