"""Lightning's launcher with processes that monitor each other from the start."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from lightning_pipes.engine.watch.launcher import LAUNCHER, environment_for_children, watch_launched
from lightning_pipes.engine.watch.shared_store import hold_port
from lightning_pipes.engine.watch.trust import secret_for_children
from lightning_pipes.trainer import private_lightning as private


class Launcher(private.SubprocessLauncher):
    """Starts the script once more for each other device of this node.

    Lightning kills all processes at once when one of them dies, up to five seconds later. Here they have time to say
    which rank has died and to close what they have open, and those that are started end when this process does.
    """

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            variables = {LAUNCHER: str(os.getpid())}
            if self.num_nodes == 1:
                variables |= secret_for_children()
                hold_port(
                    environment.main_port
                )  # of several nodes the store listens for others, and this is in its way
            with environment_for_children(variables):
                private.call_children_scripts(self)
            watch_launched(environment.node_rank() * self.num_processes + 1, self.procs)
        private.set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)
