"""Tests of the registered names of the strategies, with Trainer and with Fabric."""

from __future__ import annotations

import lightning as L
import pytest
from lightning.pytorch.strategies import StrategyRegistry

import lightning_pipes.trainer
from lightning_pipes import PipelineStrategy
from lightning_pipes.ir import PlanError
from lightning_pipes.ir.registry import installed_schedules
from tests.trainers import make_trainer


@pytest.mark.parametrize("name", ["pipeline_1f1b", "pipeline_auto", "PipelineStrategy"])
def test_fabric_names_the_alternative(name):
    with pytest.raises(PlanError, match=r"Fabric\(strategy='.*training_step, and use lightning.pytorch.Trainer\(strat"):
        L.Fabric(accelerator="cpu", devices=2, strategy=name)


def test_fabric_shows_what_a_strategy_is_for():
    with pytest.raises(PlanError, match=r"is a strategy of lightning.pytorch.Trainer, but this is a Fabric"):
        L.Fabric(accelerator="cpu", devices=2, strategy=PipelineStrategy("kfkb"))


def test_names_in_lightning_s_registry():
    assert lightning_pipes.trainer.PipelineStrategy is lightning_pipes.PipelineStrategy
    for name in installed_schedules():
        assert f"pipeline_{name}" in StrategyRegistry.available_strategies()
    trainer = make_trainer(strategy="pipeline_kfkb", devices=1)
    assert trainer.strategy.schedule.name == "kfkb"
