"""Tests that a Hydra multirun in one array has one directory, the losses of solo runs, and separate failures."""

from __future__ import annotations

import inspect
import logging
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from hydra import compose, initialize
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from lightning_pipes.ir import PlanError
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.tune import multirun as multirun_module
from lightning_pipes.tune import sweep_settings
from lightning_pipes.tune.multirun import Multirun
from lightning_pipes.tune.studies.search import distribution_from_override, open_storage
from lightning_pipes.tune.studies.shared_study import OWNER_ATTRIBUTE
from tests.launch.example import ROOT, environment
from tests.tune import app
from tests.tune.sweep import fit

ARRAY = ["hydra/launcher=job_array", "hydra.launcher.array_size=3", "hydra.sweep.dir=out"]
SEARCH = [
    *ARRAY,
    "hydra/sweeper=optuna",
    "hydra.sweeper.n_trials=6",
    "hydra.sweeper.sampler.seed=1",
    "hydra/sweeper/pruner=median",
    "hydra.sweeper.pruner.n_startup_trials=2",
    "hydra.sweeper.study_name=s",
    "lr=tag(log,interval(1e-4,1e-1))",
    "batch=5,10",
]


def multirun(rank: int, folder: str, *arguments: str) -> str:
    """Run the app, and return its error as text, or an empty string."""
    os.chdir(folder)
    sys.argv = ["app", "-m", f"devices={os.environ['WORLD_SIZE']}", *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    logging.getLogger("lightning_pipes.tune").setLevel(logging.INFO)
    try:
        app.main()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


def losses(folder: Path, log: str = "app.log") -> dict[int, float]:
    """Return the losses that jobs log at their ends, from the directory of each job."""
    found = {}
    for path in sorted(folder.glob(f"[0-9]*/{log}")):
        said = re.findall(r"job (\d+) ends with (\S+)", path.read_text())
        found.update({int(job): float(loss) for job, loss in said})
        assert {job for job, _ in said} <= {path.parent.name}, "a line went to the log of another job"
    return found


def solo(rank: int, overrides: list[dict[str, Any]]) -> list[float]:
    """Return the losses of solo runs with these settings."""
    return [fit(**{"epochs": 2, **kwargs}) for kwargs in overrides]


def overrides_of(folder: Path, job: int) -> dict[str, Any]:
    """Return the learning rate and the batch size of a job from its directory."""
    given = yaml.safe_load((folder / str(job) / ".hydra" / "overrides.yaml").read_text())
    pairs = dict(text.split("=") for text in given)
    return {"lr": float(pairs["lr"]), "batch": int(pairs["batch"])}


BY_MEMORY = ["hydra.launcher.array_size=auto", "hydra.launcher.memory={device_bytes: 1000000000, slots: 2}"]


@pytest.mark.parametrize(("ranks", "settings"), [(1, []), (2, BY_MEMORY)])
def test_the_losses_of_solo_runs(ranks: int, settings: list[str], tmp_path: Path) -> None:
    """Check the losses of an array against solo runs, and the files in its directory."""
    said = run_ranks(multirun, ranks, str(tmp_path), *ARRAY, *settings, "lr=0.1,0.01", "batch=5,10", timeout=90)
    assert said == [""] * ranks
    out = tmp_path / "out"
    found = losses(out)
    alone = run_ranks(solo, ranks, [overrides_of(out, job) for job in range(4)])[0]
    assert [found[job] for job in range(4)] == alone
    assert losses(out, "app.rank1.log") == (found if ranks == 2 else {})
    assert {p.name for p in tmp_path.iterdir()} == {"out"}
    assert {p.name for p in out.iterdir()} == {"0", "1", "2", "3", "multirun.yaml"}
    assert yaml.safe_load((out / "2" / ".hydra" / "hydra.yaml").read_text())["hydra"]["job"]["num"] == 2


def test_failures_are_told_and_their_own(tmp_path: Path) -> None:
    """Check a job that raises an error and a job that exits. The other jobs, one of them wider, end as usual."""
    said = run_ranks(multirun, 2, str(tmp_path), *ARRAY, "fail=value,exit,''", "width=6,7", timeout=90)
    assert said == ["ValueError: job 0 fails"] * 2
    assert sorted(losses(tmp_path / "out")) == [4, 5]
    for log in ("app.log", "app.rank1.log"):
        told = [(tmp_path / "out" / str(job) / log).read_text() for job in range(6)]
        assert "in main\n    raise ValueError" in told[0]
        assert "#1 failed: ValueError: job 1 fails\nTraceback" in told[1]
        assert "#2 failed: SystemExit: leaves" in told[2]
        assert "failed" not in told[4] + told[5]


def search(rank: int, folder: str, *more: str) -> str:
    """Run a search with these additional arguments."""
    return multirun(rank, folder, *SEARCH, *more)


@pytest.mark.slow
def test_a_search_and_its_next_run(tmp_path: Path) -> None:
    """Check that a search streams trials into the array, prunes them, and can be continued.

    Its losses are equal to the losses of solo runs.
    """
    storage = f"hydra.sweeper.storage=sqlite:///{tmp_path}/study.db"
    assert run_ranks(search, 2, str(tmp_path), storage, timeout=90) == ["", ""]
    study = optuna.load_study(study_name="s", storage=f"sqlite:///{tmp_path}/study.db")
    states = [t.state.name for t in study.trials]
    assert len(states) == 6
    assert set(states) == {"COMPLETE", "PRUNED"}
    out = tmp_path / "out"
    done = [t for t in study.trials if t.state.name == "COMPLETE"]
    assert [losses(out)[t.number] for t in done] == [t.value for t in done]
    assert [t.value for t in done] == run_ranks(solo, 2, [t.params for t in done])[0]
    result = yaml.safe_load((out / "optimization_results.yaml").read_text())
    assert result["best_value"] == study.best_value
    assert result["best_params"] == study.best_params
    assert run_ranks(search, 2, str(tmp_path), storage, "hydra.sweeper.n_trials=8", timeout=90) == ["", ""]
    assert [t.number for t in study.trials] == list(range(8))
    assert len({str(t.params) for t in study.trials}) == 8, "a seed must not repeat what there is"
    assert (out / "7" / "app.log").exists()


def test_two_searches_with_one_seed(tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        storage = f"hydra.sweeper.storage={tmp_path}/{name}/study.log"
        assert run_ranks(search, 1, str(tmp_path / name), storage, timeout=90) == [""]
        study = optuna.load_study(study_name="s", storage=open_storage(f"{tmp_path}/{name}/study.log"))
        found.append([(t.params, t.values, t.state, t.intermediate_values) for t in study.trials])
    assert found[0] == found[1]


def test_failing_trial_ends_the_search_by_default(tmp_path: Path) -> None:
    """Check that a failing trial ends a search, unless `max_failure_rate` allows failures."""
    (said,) = run_ranks(search, 1, str(tmp_path), "fail=value,no", timeout=90)
    assert re.fullmatch(r"ValueError: job \d fails", said)
    more = ["fail=value,no", "hydra.sweeper.max_failure_rate=1"]
    assert run_ranks(search, 1, str(tmp_path), *more, timeout=90) == [""]
    folders = [*(tmp_path / "out").glob("[0-9]*")]
    assert len(folders) == 6
    logs = [(folder / "app.log").read_text() for folder in folders]
    assert all((" ends with " in log) != ("raise ValueError" in log) for log in logs)


def test_known_trials_are_not_run_again(tmp_path: Path) -> None:
    arguments = [a for a in SEARCH if not a.startswith(("lr", "batch"))]
    assert run_ranks(multirun, 2, str(tmp_path), *arguments, "lr=0.1,0.01", "hydra.sweeper.reuse=true") == ["", ""]
    ran = losses(tmp_path / "out")
    assert 2 <= len(ran) < 6
    assert len(set(ran.values())) == 2


def test_other_launchers_get_batches(tmp_path: Path) -> None:
    """Check that searches work with Hydra's basic launcher, which runs one job after another in one process."""
    custom = ["hydra.sweeper.custom_search_space=tests.tune.app.custom"]
    plain = [a for a in SEARCH if "launcher" not in a and "pruner" not in a]
    assert run_ranks(alone, 1, str(tmp_path), *plain, *custom) == [""]
    found = losses(tmp_path / "out")
    assert sorted(found) == list(range(6))
    given = [(tmp_path / "out" / str(job) / ".hydra" / "overrides.yaml").read_text() for job in range(6)]
    assert all(("epochs=" in text) == ("batch=5" in text) for text in given)
    assert any("batch=5" in text for text in given)
    (said,) = run_ranks(multirun, 1, str(tmp_path), *plain)
    assert "choose hydra/launcher=job_array" in said


def alone(rank: int, folder: str, *more: str) -> str:
    """Run the app as a plain script, without the environment of torchrun."""
    for name in [n for n in os.environ if n.startswith(("TORCHELASTIC", "MASTER")) or n in ("RANK", "LOCAL_RANK")]:
        del os.environ[name]
    return multirun(rank, folder, *more)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["lr=0.1"], "nothing to search"),
        (["lr=interval(1e-3,1e-1)", "hydra.sweeper.direction=[minimize,maximize]"], "can't prune with several"),
        (["hydra.sweeper.direction=down"], "it must be minimize, maximize"),
        (["hydra.sweeper.storage=study.txt"], "a journal file that ends in .log"),
        (["hydra.sweeper.n_trials=-1"], "n_trials must be"),
        (["hydra.job.chdir=true"], "set hydra.job.chdir=false"),
        (["hydra.launcher.array_size=0"], "hydra.launcher.array_size must be at least 1"),
        (["hydra.launcher.array_size=two"], "hydra.launcher.array_size must be"),
        (["hydra.launcher.array_size=auto"], "size='auto' is computed from memory"),
        (["hydra.launcher.memory={device_byte: 9}"], "MemorySwap does not accept"),
        (["hydra.launcher.memory={device_bytes: 100}"], "the device's budget is 100"),
    ],
)
def test_mistakes(more: list[str], said: str, tmp_path: Path) -> None:
    arguments = [a for a in SEARCH if not a.startswith(("lr", "batch"))]
    sweep = [] if "lr" in more[0] else ["lr=0.1,0.2"]
    assert said in run_ranks(multirun, 1, str(tmp_path), *arguments, *sweep, *more)[0]


def search_without(rank: int, folder: str, sampler: str, *packages: str) -> str:
    """Run a search with a sampler, as if these packages were not installed."""
    sys.modules.update(dict.fromkeys(packages))  # type: ignore[arg-type]
    return search(rank, folder, f"hydra/sweeper/sampler={sampler}", "hydra.sweep.dir=out")


def test_error_names_the_package_of_a_sampler(tmp_path: Path) -> None:
    missing = {"cmaes": "pip install cmaes", "botorch": "pip install optuna-integration[botorch]"}
    for sampler, said in missing.items():
        (error,) = run_ranks(search_without, 1, str(tmp_path), sampler, "cmaes", "optuna_integration")
        assert said in error, error


class StrangersStore:
    """A store that returns the message of an unknown sender, because the hosts have no secret."""

    is_leader = is_signed = False
    folder = ""

    def get(self, key: str) -> tuple[str, str]:
        return self.folder, "app"


def test_a_stranger_does_not_choose_the_directory_of_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that an unsigned message may choose only a directory like the rank's own."""
    monkeypatch.setattr(multirun_module, "LeaderStore", StrangersStore)
    for overrides, folder, accepted in (
        ("out/05-10", "out/06-11", True),
        ("out/05-10", "out/06-11/../../..", False),
        ("out", "/home/another", False),
    ):
        monkeypatch.setattr(StrangersStore, "folder", str(tmp_path / folder))
        with initialize(version_base=None, config_path=None):
            config = compose(overrides=[f"hydra.sweep.dir={tmp_path / overrides}"], return_hydra_config=True)
        OmegaConf.set_readonly(config.hydra, False)
        config.hydra.job.update(name="app", chdir=False)
        if accepted:
            assert Multirun(None, None, config, 1)._folder == str(tmp_path / folder)
            continue
        with pytest.raises(PlanError, match="Set LIGHTNING_PIPES_SECRET"):
            Multirun(None, None, config, 1)


def test_a_mistake_is_a_sentence(tmp_path: Path) -> None:
    """Check that a mistake ends in one sentence.

    Hydra prints no traceback, which would hide the sentence, unless the user requests one.
    """
    found = script(tmp_path, [sys.executable], ["hydra/launcher=job_array", "hydra.job.chdir=true", "lr=0.1,0.2"])
    assert found.returncode == 1
    assert "Traceback" not in found.stderr
    assert found.stderr.splitlines()[0].endswith("use ${hydra:runtime.output_dir} for paths")


def script(folder: Path, launcher: list[str], arguments: list[str]) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "WORLD_SIZE")}
    return subprocess.run(
        [*launcher, "-m", "tests.tune.app", "-m", *arguments],
        cwd=folder,
        env={**env, **environment("multirun")},
        capture_output=True,
        text=True,
        timeout=600,
    )


TORCHRUN = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node=2"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [[sys.executable], TORCHRUN])
def test_launchers(launcher: list[str], tmp_path: Path) -> None:
    """Check that processes started by Lightning or torchrun join one multirun, and create no other directories."""
    found = script(tmp_path, launcher, [a for a in SEARCH if a != "hydra.sweep.dir=out"])
    assert found.returncode == 0, found.stderr
    (folder,) = tmp_path.glob("multirun/*/*")
    assert {p.name for p in tmp_path.iterdir()} == {"multirun"}
    assert {p.name for p in folder.iterdir()} == {*"012345", "multirun.yaml", "optimization_results.yaml"}
    assert losses(folder) == losses(folder, "app.rank1.log") != {}
    assert found.stdout.count("job 3 starts") == 1  # other ranks leave the console to rank 0
    assert yaml.safe_load((folder / "multirun.yaml").read_text())["hydra"]["job"]["name"] == "app"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "launcher"),
    [
        ("hydra_plugins.hydra_joblib_launcher", ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]),
        ("hydra_plugins.hydra_submitit_launcher", ["hydra/launcher=submitit_local"]),
    ],
)
def test_each_job_of_another_launcher_is_one_array(package: str, launcher: list[str], tmp_path: Path) -> None:
    """Check that each job of Hydra's launchers runs an array of two processes, and that the arrays share one study.

    A job that trains in its own process is refused.
    """
    pytest.importorskip(package)
    storage = f"sqlite:///{tmp_path}/study.db"

    def run(folder: str, arrays: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tests.tune.workers", "-m", *launcher, f"hydra.sweep.dir={tmp_path}/out"]
        command += [f"+folder={folder}", f"+array={arrays}"]
        env = {**os.environ, **environment("")}
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)

    found = run(str(tmp_path), "0,1")
    assert found.returncode == 0, found.stdout + found.stderr
    trials = optuna.load_study(study_name="script", storage=storage).trials
    assert {trial.state.is_finished() for trial in trials} == {True}
    assert sorted(Counter(trial.user_attrs[OWNER_ATTRIBUTE] for trial in trials).values()) == [6, 6]
    assert len([*tmp_path.glob("*.said")]) == 4
    assert "and can't be started again as one of the 2 processes of a pipeline" in run("", "0").stderr


class TestSettings:
    @pytest.fixture(autouse=True)
    def hydra(self) -> Iterator[None]:
        Plugins.instance()
        with initialize(version_base="1.3", config_path=None):
            yield

    @pytest.mark.parametrize(
        ("overrides", "said"),
        [
            (["hydra/launcher=job_array", "hydra.launcher.array_sizes=2"], "array_sizes"),
            (["hydra/sweeper=optuna", "hydra.sweeper.n_trial=2"], "n_trial"),
            (["hydra/sweeper=optuna", "hydra.sweeper.n_trials=many"], "Integer"),
            (["hydra/sweeper=optuna", "hydra.sweeper.sampler.sed=2"], "sed"),
            (["hydra/sweeper=optuna", "hydra/sweeper/sampler=gp", "hydra.sweeper.sampler.seed=x"], "Integer"),
            (["hydra/sweeper=optuna", "hydra/sweeper/pruner=medium"], "medium"),
        ],
    )
    def test_mistakes_are_found_when_composed(self, overrides: list[str], said: str) -> None:
        with pytest.raises(HydraException) as raised:
            compose("app", overrides=overrides, return_hydra_config=True)
        assert said in f"{raised.value} {raised.value.__cause__}"

    @pytest.mark.parametrize(
        ("group", "name"),
        [
            *(("sampler", name) for name in sweep_settings.SAMPLERS),
            *(("pruner", name) for name in sweep_settings.PRUNERS),
        ],
    )
    @pytest.mark.filterwarnings("ignore")
    def test_settings_match_optuna(self, group: str, name: str) -> None:
        if name == "botorch":
            pytest.importorskip("optuna_integration")
        node = {"sampler": sweep_settings.SAMPLERS, "pruner": sweep_settings.PRUNERS}[group][name]
        cfg = compose(
            "app", overrides=["hydra/sweeper=optuna", f"hydra/sweeper/{group}={name}"], return_hydra_config=True
        )
        settings = cfg.hydra.sweeper[group]
        made = get_class(settings._target_)
        taken = inspect.signature(made).parameters
        assert isinstance(instantiate(settings), made)
        for field in fields(node):
            if not field.name.startswith("_"):
                assert taken[field.name].default == field.default, field.name


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("x=interval(0,1)", FloatDistribution(0.0, 1.0)),
        ("x=int(interval(1,10))", IntDistribution(1, 10)),
        ("x=tag(log,interval(1e-3,1))", FloatDistribution(1e-3, 1.0, log=True)),
        ("x=tag(log,int(interval(1,64)))", IntDistribution(1, 64, log=True)),
        ("x=range(1,8,step=2)", IntDistribution(1, 7, step=2)),
        ("x=range(0,1,step=0.25)", FloatDistribution(0.0, 0.75, step=0.25)),
        ("x=choice(a,b)", CategoricalDistribution(["a", "b"])),
        ("x=1,2.5,true", CategoricalDistribution([1, 2.5, True])),
        ("x=3", None),
        ("~x", None),
    ],
)
def test_sweeps_as_distributions(text: str, found: Any) -> None:
    """Check the distributions of Hydra's sweep syntax."""
    assert distribution_from_override(OverridesParser.create().parse_override(text)) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x=tag(lin,interval(0,1))", "unknown tag lin"),
        ("x=tag(log,interval(0,1))", "starts above 0"),
        ("x=tag(log,choice(1,2))", "goes with interval"),
        ("x=interval(2,1)", "smaller number first"),
        ("x=glob(*)", "can't search"),
    ],
)
def test_sweeps_that_are_none(text: str, said: str) -> None:
    """Check the errors for sweeps that cannot become distributions."""
    with pytest.raises(PlanError, match=re.escape(said)):
        distribution_from_override(OverridesParser.create().parse_override(text))
