"""Pipeline parallelism as a strategy of the Lightning Trainer.

Importing this package registers a name `pipeline_<schedule>` for every installed schedule and for "auto", for use in
`Trainer(strategy="pipeline_...")`. It also registers the name of the class.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_pipes.ir import InputError
from lightning_pipes.ir.registry import installed_schedules
from lightning_pipes.trainer.callbacks.schedule_tuner import ScheduleTuner
from lightning_pipes.trainer.callbacks.timeline_logger import TimelineLogger
from lightning_pipes.trainer.plan.settings import AUTO
from lightning_pipes.trainer.reports.report import PipelineReport
from lightning_pipes.trainer.strategy import PipelineStrategy

CLASS_NAMES = ("PipelineStrategy", "lightning_pipes.PipelineStrategy")
"""The class names. LightningCLI passes `--trainer.strategy=CLASS` as a name unless arguments of the class follow."""


def register_names() -> None:
    """Register the strategy names with Lightning, in lower case because the Trainer converts names to lower case.

    The names are also registered with Fabric, so that Fabric raises an error with an explanation.
    """
    settings: dict[str, dict[str, Any]] = {f"pipeline_{name}": {"schedule": name} for name in installed_schedules()}
    settings[f"pipeline_{AUTO}"] = {"schedule": AUTO}
    settings.update({name: {} for name in CLASS_NAMES})
    for name, given in settings.items():
        if name.lower() not in STRATEGY_REGISTRY:
            STRATEGY_REGISTRY.register(name.lower(), partial(_refuse_fabric, name), "for lightning.pytorch.Trainer")
        if name.lower() not in StrategyRegistry:
            described = ", ".join(map(repr, given.values()))
            StrategyRegistry.register(name.lower(), PipelineStrategy, f"PipelineStrategy({described})", **given)


def _refuse_fabric(name: str) -> NoReturn:
    raise InputError(
        f"Fabric(strategy={name!r}): a pipeline calls the steps of a LightningModule, and a loop of Fabric's has "
        f"none. Put the loop's body into training_step, and use lightning.pytorch.Trainer(strategy={name!r})"
    )


__all__ = ["PipelineReport", "PipelineStrategy", "ScheduleTuner", "TimelineLogger"]

register_names()
