"""Names for `Trainer(strategy="pipeline_...")`: one for every installed schedule."""

from __future__ import annotations

from lightning.pytorch.strategies import StrategyRegistry

from lightning_pipes.ir.registry import installed_schedules
from lightning_pipes.trainer.strategy import PipelineStrategy


def register_names() -> None:
    """Registers `pipeline_<schedule>` with Lightning, in lower case because the Trainer lowers what it is given."""
    for name in installed_schedules():
        key = f"pipeline_{name}".lower()
        if key not in StrategyRegistry:
            StrategyRegistry.register(key, PipelineStrategy, description=f"PipelineStrategy({name!r})", schedule=name)
