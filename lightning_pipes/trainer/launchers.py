"""Launchers that start the other ranks of this node: as processes of the same script, or as forks of this process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins import ClusterEnvironment

from lightning_pipes.engine.watch.launcher import (
    LAUNCHER_VARIABLE,
    environment_for_children,
    stop_watching_launched,
    watch_launched,
)
from lightning_pipes.engine.watch.script import find_command, find_job_launcher
from lightning_pipes.engine.watch.shared_store import hold_port
from lightning_pipes.engine.watch.trust import secret_for_children
from lightning_pipes.ir import PlanError
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.fork_launcher import ForkLauncher


class Launcher(private.SubprocessLauncher):
    """Starts the script once more for each other device of this node.

    If a process dies, Lightning kills all other processes up to five seconds later. With this launcher, they have time
    to report which rank has died and to close their resources. The started processes end when this process ends.

    Args:
        environment: the cluster environment.
        num_processes: the number of processes on this node.
        num_nodes: the number of nodes.
        command: the command that starts the script.
        directory: the working directory of the command.
    """

    def __init__(
        self,
        environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        command: Sequence[str] = (),
        directory: str = "",
    ) -> None:
        super().__init__(environment, num_processes, num_nodes)
        self._command, self._directory = command, directory

    @property
    def is_interactive_compatible(self) -> bool:
        return self.num_processes == 1  # no process is started in this case

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if self.num_processes * self.num_nodes > 1 and not environment.creates_processes_externally:
            variables = {LAUNCHER_VARIABLE: str(os.getpid())}
            if self.num_nodes == 1:
                variables |= secret_for_children()
                hold_port(
                    environment.main_port
                )  # with several nodes, this would block the port of the store, which listens for other nodes
            with environment_for_children(variables):
                private.call_children_scripts(self, self._command, self._directory)
            watch_launched(environment.node_rank() * self.num_processes + 1, self.procs)
        private.set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def kill(self, signum: Any) -> None:
        """Send a signal to the started processes. If Lightning kills them after Ctrl-C, this is not a failure."""
        if signum == signal.SIGKILL:
            stop_watching_launched()
        super().kill(signum)


def make_launcher(
    strategy: Any, environment: ClusterEnvironment, num_processes: int, num_nodes: int
) -> Launcher | ForkLauncher:
    """Return the launcher that can start the other ranks of this program.

    Args:
        strategy: the strategy of the ranks.
        environment: the cluster environment.
        num_processes: the number of processes on this node.
        num_nodes: the number of nodes.

    Raises:
        PlanError: this program can neither be started again nor forked.
    """
    if num_processes * num_nodes == 1:
        return Launcher(environment, num_processes, num_nodes)
    job_launcher = find_job_launcher()
    if job_launcher is not None:
        raise PlanError(
            f"this process was started by {job_launcher} for one job, and can't be started again as one of the "
            f"{num_processes} processes of a pipeline. Let the job start a script that trains, for example with "
            "subprocess.run([sys.executable, 'sweep.py'], check=True), or with torchrun on SLURM"
        )
    command = find_command()
    is_prompt = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    if command is not None and not is_prompt:
        return Launcher(environment, num_processes, num_nodes, *command)
    why = "it runs in a notebook or at a prompt" if is_prompt else "it has no script file"
    if num_nodes > 1:
        raise PlanError(
            f"this program can't be started again as another rank, because {why}, and ranks of {num_nodes} nodes can't "
            "be forked from it. Write the program to a file, and start the file on every node, for example with "
            "torchrun"
        )
    return ForkLauncher(strategy, environment, num_processes, why)
