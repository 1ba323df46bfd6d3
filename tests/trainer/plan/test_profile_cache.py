"""Tests that a second run starts without measuring, with the profile that the first run stored."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipes import PipelineStrategy
from lightning_pipes.cost import LayerProfile, ModelProfile
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.plan import profile_cache
from lightning_pipes.trainer.plan.profile_cache import PROFILES_VARIABLE, ProfileCache, clear_profiles, find_cache
from lightning_pipes.tune.cli.main import main
from tests.trainer.lit import quiet
from tests.trainers import make_trainer
from tests.virtual_clock import VirtualClock

PROFILE = ModelProfile((LayerProfile("one", ((1, 0.5),), ((1, 1.0),)),))


def test_a_profile_is_found_by_its_key(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path / "kept")
    assert cache.find_profile("a") is None
    cache.keep_profile("a", PROFILE)
    assert cache.find_profile("a") == PROFILE
    assert cache.find_profile("b") is None
    assert [path.suffix for path in (tmp_path / "kept").iterdir()] == [".json"]


def test_another_version_measures_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ProfileCache(tmp_path).keep_profile("a", PROFILE)
    monkeypatch.setattr(profile_cache, "version", lambda name: "0.0.0")
    assert ProfileCache(tmp_path).find_profile("a") is None


def test_a_contradicted_profile_is_removed(tmp_path: Path) -> None:
    ProfileCache(tmp_path).keep_profile("a", PROFILE)
    later = ProfileCache(tmp_path)
    later.forget_profile()  # it has not used any profile
    assert later.find_profile("a") == PROFILE
    later.forget_profile()
    assert ProfileCache(tmp_path).find_profile("a") is None


def test_damaged_files_and_those_of_others_are_left_alone(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path)
    cache.keep_profile("a", PROFILE)
    (file,) = tmp_path.iterdir()
    if os.getuid() == 0:
        os.chown(file, 12345, -1)
        assert cache.find_profile("a") is None
        os.chown(file, 0, -1)
    file.write_text("{")
    assert cache.find_profile("a") is None


def test_folder_of_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = pl.Trainer(default_root_dir=tmp_path, logger=False, accelerator="cpu")
    monkeypatch.setenv(PROFILES_VARIABLE, "")
    find_cache(trainer).keep_profile("a", PROFILE)
    assert [*tmp_path.iterdir()] == []
    monkeypatch.delenv(PROFILES_VARIABLE)
    find_cache(trainer).keep_profile("a", PROFILE)
    assert clear_profiles(tmp_path) == 1
    assert [*tmp_path.iterdir()] == []
    monkeypatch.setenv(PROFILES_VARIABLE, str(tmp_path / "named"))
    find_cache(trainer).keep_profile("a", PROFILE)
    assert clear_profiles(tmp_path / "another") == 1


def test_a_folder_that_is_a_file_keeps_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    cache = ProfileCache(tmp_path / "file")
    cache.keep_profile("a", PROFILE)
    assert cache.find_profile("a") is None
    assert (tmp_path / "file").read_text() == "kept"


def test_the_command_removes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(PROFILES_VARIABLE)
    ProfileCache(tmp_path / profile_cache.PROFILE_FOLDER).keep_profile("a", PROFILE)
    assert main(["profile", "--clear"]) == 0
    assert "1 profile" in capsys.readouterr().out
    assert [*tmp_path.iterdir()] == []


TIME = VirtualClock()


class Slow(nn.Linear):
    """A layer that takes the given time on a virtual clock and counts its forwards."""

    forwards = 0

    def __init__(self, seconds: float) -> None:
        super().__init__(6, 6)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Slow.forwards += 1
        TIME.sleep(self.seconds)
        return super().forward(x)


class LitSlow(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Slow(0.012 if n == 0 else 0.004) for n in range(6)))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layers(batch).square().mean()  # type: ignore[no-any-return]

    def on_train_start(self) -> None:
        self.forwards = Slow.forwards

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(rank: int, folder: str) -> tuple[int, Any]:
    """Return the number of forwards before training and the cut."""
    quiet()
    TIME.patch(pytest.MonkeyPatch())
    os.environ[PROFILES_VARIABLE] = folder
    # the check would run the step with parts of a batch
    strategy = PipelineStrategy("1f1b", microbatches=4, check_loss=False)
    trainer = make_trainer(strategy=strategy, max_steps=1)
    module = LitSlow()
    trainer.fit(module, DataLoader(torch.zeros(16, 6), batch_size=16))
    return module.forwards, [*map(tuple, strategy.decision.layers)]


def test_a_second_run_does_not_measure(tmp_path: Path) -> None:
    first, second = (run_ranks(train, 2, str(tmp_path / "kept"), timeout=120) for _ in range(2))
    assert first[0][0] > 6 * 4
    # the step runs once, to check that it calls the layers in order
    assert [forwards for forwards, _ in second] == [6, 6]
    assert [cut for _, cut in second] == [cut for _, cut in first]
