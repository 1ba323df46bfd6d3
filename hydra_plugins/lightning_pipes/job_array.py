"""`hydra/launcher=job_array`, with which the jobs of a multirun share one pipeline.

This module does not use `from __future__ import annotations`, because Hydra runs it before it is in sys.modules.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from lightning_pipes.import_hook import warn_on_error

with warn_on_error("hydra/launcher=job_array"):
    from lightning_pipes.tune import sweep_settings
    from lightning_pipes.tune.messages import as_settings_error

    sweep_settings.register_launcher()


class JobArrayLauncher(Launcher):
    """Launcher that runs the jobs of a multirun as siblings of a job array.

    Args:
        array_size: number of jobs at a time, or "auto".
        memory: arguments of `MemorySwap`, or None.

    Attributes:
        multirun: the implementation, which `setup` creates.
    """

    def __init__(self, array_size: Any, memory: Mapping[str, Any] | None) -> None:
        self.array_size, self.memory = array_size, memory
        self.multirun: Any = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        # imported here because it imports torch, which would slow down Hydra's search for plugins
        from lightning_pipes.tune.multirun import Multirun

        with as_settings_error():
            self.multirun = Multirun(hydra_context, task_function, config, self.array_size, self.memory)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        with as_settings_error():
            returns: Sequence[JobReturn] = self.multirun.launch_jobs(job_overrides, initial_job_idx)
        return returns
