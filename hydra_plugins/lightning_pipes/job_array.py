"""`hydra/launcher=job_array`: the jobs of a multirun share one pipeline.

No `from __future__ import annotations` here: Hydra runs this module before it is in sys.modules.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from lightning_pipes.harmless import harmless

with harmless("hydra/launcher=job_array"):
    from lightning_pipes.tune import sweep_settings
    from lightning_pipes.tune.messages import as_settings_error

    sweep_settings.register_launcher()


class JobArrayLauncher(Launcher):
    """Attributes: multirun, from `setup` on, is what runs the jobs."""

    def __init__(self, array_size: Any, memory: Mapping[str, Any] | None) -> None:
        self.array_size, self.memory = array_size, memory
        self.multirun: Any = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        # torch is imported here, and not when Hydra looks for plugins
        from lightning_pipes.tune.multirun import Multirun

        with as_settings_error():
            self.multirun = Multirun(hydra_context, task_function, config, self.array_size, self.memory)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        with as_settings_error():
            returns: Sequence[JobReturn] = self.multirun.launch_jobs(job_overrides, initial_job_idx)
        return returns
