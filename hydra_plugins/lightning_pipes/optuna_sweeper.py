"""`hydra/sweeper=optuna`, with which Optuna chooses the jobs of a multirun.

This module does not use `from __future__ import annotations`, because Hydra runs it before it is in sys.modules.
"""

from typing import Any

from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from lightning_pipes.import_hook import warn_on_error

with warn_on_error("hydra/sweeper=optuna"):
    from lightning_pipes.tune import sweep_settings
    from lightning_pipes.tune.messages import as_settings_error

    sweep_settings.register_sweeper()


class OptunaSweeper(Sweeper):
    """Sweeper that searches with Optuna. The arguments are the fields of OptunaSettings."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._search: Any = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from hydra.core.plugins import Plugins

        from lightning_pipes.tune.studies.search import (
            OptunaSearch,  # imported here because it imports Optuna, which is slow
        )

        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )
        with as_settings_error():
            self._search = OptunaSearch(self._settings, hydra_context, config, self.launcher)

    def sweep(self, arguments: list[str]) -> Any:
        with as_settings_error():
            return self._search.run(arguments)
