"""Check that conf/ contains the settings of the code, and that wrong settings are refused with a helpful message."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf

from lightning_pipes.ir import PlanError
from lightning_pipes.ir.registry import installed_schedules
from lightning_pipes.tune import schema
from lightning_pipes.tune.messages import explain_error, plain_errors
from lightning_pipes.tune.schema import SCHEDULE_FACTORY, schedule_schema

ROOT = Path(__file__).parents[2]
SCHEDULES = sorted(path.stem for path in (ROOT / "conf" / "schedule").glob("*.yaml") if path.stem != "auto")


@pytest.fixture(autouse=True)
def hydra() -> Iterator[None]:
    with initialize_config_module("lightning_pipes.conf", version_base="1.3"):
        yield


def composed(*overrides: str) -> DictConfig:
    return compose("train", overrides=[*overrides])


def test_every_installed_schedule_of_ours_has_settings() -> None:
    ours = {name for name, entry in installed_schedules().items() if entry.value.startswith("lightning_pipes.")}
    assert ours == set(SCHEDULES) == set(schema.our_schedules())


@pytest.mark.parametrize("name", SCHEDULES)
def test_files_show_every_setting_of_their_schedule(name: str) -> None:
    settings = {f.name for f in fields(schedule_schema(name))} - {"_target_"}
    assert settings == {"name", *(f.name for f in fields(installed_schedules()[name].load()))}
    written = yaml.safe_load((ROOT / "conf" / "schedule" / f"{name}.yaml").read_text())
    assert set(written) - {"defaults"} == settings


def test_schemas_are_made_when_they_are_asked_for() -> None:
    code = (
        "import sys; from hydra.core.config_store import ConfigStore; from lightning_pipes.tune import schema;"
        "schema.register(); before = 'lightning_pipes.strategies' in sys.modules or 'numpy' in sys.modules;"
        "load = ConfigStore.instance().load; path = 'lightning_pipes/schema/schedule/kfkb.yaml';"
        "load(path).node.k = 7; print(before, load(path).node)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    settings = f"{{'_target_': '{SCHEDULE_FACTORY}', 'name': 'kfkb', 'k': 1, 'prune': 'per_k', 'largest_k': None}}"
    assert found == f"False {settings}"


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_is_made_from_its_settings(name: str) -> None:
    cfg = composed(f"schedule={name}")
    assert instantiate(cfg.schedule).name == name
    assert isinstance(OmegaConf.to_object(cfg), schema.TrainSettings)


def test_auto_is_left_to_the_strategy() -> None:
    from lightning_pipes import PipelineStrategy

    cfg = composed("schedule=auto", "pipeline.microbatches=null")
    assert isinstance(OmegaConf.to_object(cfg), schema.TrainSettings)
    strategy = PipelineStrategy(instantiate(cfg.schedule), **OmegaConf.to_container(cfg.pipeline))
    assert strategy._request.chooses
    assert strategy._request.partition == "auto"


def test_a_setting_arrives() -> None:
    assert instantiate(composed("schedule.k=5").schedule).k == 5
    assert instantiate(composed("schedule=interleaved", "schedule.stages_per_rank=3").schedule).stages_per_rank == 3


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "conf" / "cluster").glob("*.yaml")))
def test_a_cluster_is_made_from_its_settings(name: str) -> None:
    cfg = compose(f"cluster/{name}", overrides=["cluster.hosts=3", "cluster.between.latency=7us"]).cluster
    made = instantiate(cfg)
    assert len(made.devices) == 3 * cfg.devices_per_host
    assert made.link_between(0, len(made.devices) - 1).latency == 7e-6
    written = yaml.safe_load((ROOT / "conf" / "cluster" / f"{name}.yaml").read_text())
    assert set(written) - {"defaults"} == {f.name for f in fields(schema.ClusterSettings)} - {"_target_"}


def test_trainer_settings_are_arguments_of_trainer() -> None:
    from lightning.pytorch import Trainer

    taken = inspect.signature(Trainer.__init__).parameters
    assert {f.name for f in fields(schema.TrainerSettings)} <= set(taken)


def test_pipeline_settings_are_arguments_of_the_strategy() -> None:
    from lightning_pipes import PipelineStrategy

    taken = inspect.signature(PipelineStrategy.__init__).parameters
    declared = {f.name: f.default for f in fields(schema.PipelineSettings)}
    assert declared == {name: taken[name].default for name in declared}
    assert list(declared) == [name for name in taken if name in declared], "the order by theme"


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the examples, whose configuration is composed, and whose modules can be imported."""
    folder = ROOT / "examples"
    monkeypatch.syspath_prepend(str(folder))
    import settings

    settings.register()
    GlobalHydra.instance().clear()  # which `hydra` has initialized
    with initialize_config_dir(str(folder / "conf"), version_base="1.3"):
        yield folder


@pytest.mark.parametrize("kind", ["model", "data"])
def test_model_and_data_settings_are_arguments_of_the_examples(kind: str, examples: Path) -> None:
    import settings

    names = {path.stem for path in (examples / "conf" / kind).glob("*.yaml")}
    assert names == {key.split("/")[1] for key in settings.SETTINGS if key.startswith(f"{kind}/")}
    for name in names:
        declared = settings.SETTINGS[f"{kind}/{name}"]
        taken = set(inspect.signature(get_class(declared._target_).__init__).parameters)  # type: ignore[misc]
        assert {f.name for f in fields(declared)} - {"_target_"} <= taken
        written = yaml.safe_load((examples / "conf" / kind / f"{name}.yaml").read_text())
        assert written["_target_"] == declared._target_


def test_the_examples_are_composed_with_their_models(examples: Path) -> None:
    """The configuration of the examples extends that of lightning_pipes, and is checked in the same way."""
    cfg = compose("example", overrides=["model=mlp", "data=digits", "schedule=1f1b", "model.width=8"])
    assert (cfg.pipeline.microbatches, cfg.schedule.name, cfg.data.batch_size) == (8, "1f1b", 32)
    assert type(instantiate(cfg.model, **cfg.optimizer)).__name__ == "MLP"
    assert compose("supernet").data._target_ == "data.Digits"
    for override, said in EXAMPLE_MISTAKES:
        with pytest.raises(HydraException) as caught:
            compose("example", overrides=[override])
        assert explain_error(caught.value).startswith(said)


EXAMPLE_MISTAKES = [
    (
        "model=resnet",
        "model=resnet: there is no such model. Did you mean 'resnet_digits'? Choose from: gpt, lora, mlp,",
    ),
    ("model.depth=2", "model.depth: model has no 'depth'. Did you mean"),
    ("model.width=wide", "model.width=wide: needs int, as in model.width=128"),
]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("schedule.kk=2", "schedule.kk: schedule has no 'kk'. Did you mean 'k'? Choose from: name, k"),
        ("schedule.k=abc", "schedule: kfkb: k must be a whole number, got 'abc'; k=1 is 1F1B, and k='auto' chooses"),
        ("schedule.k=1.5", "schedule.k=1.5: needs int | str, as in schedule.k=2"),
        ("schedule.k=null", "schedule.k=None: needs int | str, as in schedule.k=2"),
        ("schedule.k=0", "schedule: kfkb: k must be at least 1, got 0; k=1 is 1F1B"),
        ("schedule=kfbk", "schedule=kfbk: there is no such schedule. Did you mean 'kfkb'? Choose from: 1f1b, auto,"),
        ("scheduel=gpipe", "scheduel: the configuration has no 'scheduel'. Did you mean 'schedule'?"),
        ("trainer.devces=2", "trainer.devces: trainer has no 'devces'. Did you mean 'devices'?"),
        ("trainer.devices=two", "trainer.devices=two: needs int, as in trainer.devices=2"),
        ("trainer.limit_val_batches=a", "trainer.limit_val_batches=a: needs int | float | None"),
        ("optimizer.lr=fast", "optimizer.lr=fast: needs float, as in optimizer.lr=0.003"),
        ("optimizer.learning_rate=1", "optimizer.learning_rate: optimizer has no 'learning_rate'. Choose from: lr,"),
        ("pipeline=3", "pipeline=3: set one of its values instead: pipeline.microbatches,"),
        ("pipeline.microbatches=[4]", "pipeline.microbatches=[4]: needs int | None, as in pipeline.microbatches=8"),
        ("schedule.k", "schedule.k: Error parsing override"),
    ],
)
def test_mistakes_are_explained(override: str, said: str) -> None:
    with pytest.raises(HydraException) as caught:
        instantiate(composed(override).schedule)
    assert explain_error(caught.value).startswith(said)


class TestPlainErrors:
    @pytest.fixture(autouse=True)
    def clean(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)

    def test_our_errors_end_the_process_and_others_pass(self) -> None:
        with pytest.raises(SystemExit, match="too many stages"), plain_errors():
            raise PlanError("too many stages")
        with pytest.raises(ZeroDivisionError), plain_errors():
            raise ZeroDivisionError
        assert "HYDRA_FULL_ERROR" not in os.environ

    def test_the_user_can_ask_for_the_traceback(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
        with pytest.raises(PlanError), plain_errors():
            raise PlanError("too many stages")
        assert os.environ["HYDRA_FULL_ERROR"] == "1"

    def test_a_child_process_does_not_take_our_switch_for_the_users(self) -> None:
        child = "from lightning_pipes.ir import PlanError; from lightning_pipes.tune.messages import plain_errors\n"
        child += "with plain_errors(): raise PlanError('too many stages')"
        with plain_errors():  # the child inherits the environment variable that this sets
            found = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
        assert "too many stages" in found.stderr
        assert "Traceback" not in found.stderr


def test_another_app_gets_the_schemas_and_nothing_else(tmp_path: Path) -> None:
    """Check an app that does not use the package.

    Hydra loads our plugin in every app of the environment, but it must not change the app's own groups.
    """
    (tmp_path / "schedule").mkdir()
    (tmp_path / "schedule" / "kfkb.yaml").write_text("k: this app means something else\n")
    (tmp_path / "app.yaml").write_text(
        "defaults: [schedule: kfkb, /lightning_pipes/schema/schedule/kfkb@pipe, _self_]\npipe: {k: 3}\n"
    )
    (tmp_path / "app.py").write_text(
        "import sys, hydra\n"
        "@hydra.main(version_base='1.3', config_path='.', config_name='app')\n"
        "def main(cfg):\n"
        "    print(cfg.schedule.k, '|', hydra.utils.instantiate(cfg.pipe), '|', 'torch' in sys.modules)\n"
        "main()\n"
    )

    def run(*overrides: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "app.py", "hydra.run.dir=.", "hydra.output_subdir=null", *overrides]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    assert run().stdout.strip() == "this app means something else | KFKB(k=3) | False"
    assert "k must be a whole number" in run("pipe.k=x").stderr
