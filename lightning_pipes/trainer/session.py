"""The resources that one rank shares with the other ranks, from one call of `setup_environment` to the next."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.optim import Optimizer

from lightning_pipes.engine.watch.failure import FailureWatch
from lightning_pipes.engine.watch.fault_points import fault_point
from lightning_pipes.engine.watch.launcher import (
    StartupWatch,
    exited_ranks,
)
from lightning_pipes.engine.watch.process_exit import has_given_up, leak_until_exit, skip_final_gc
from lightning_pipes.engine.watch.rendezvous import store_host
from lightning_pipes.engine.watch.shared_store import (
    adopt_store,
    current_store,
    keep_store,
    run_store,
)
from lightning_pipes.ir import PlanError
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.active_run import ActiveRun
from lightning_pipes.trainer.checkpoint.files import CheckpointWriter
from lightning_pipes.trainer.checkpointing import Checkpointing
from lightning_pipes.trainer.checks import broadcast_random_state
from lightning_pipes.trainer.cuts.cut import ModuleCut
from lightning_pipes.trainer.loop.connections import Connections, Idle, make_connections
from lightning_pipes.trainer.optimizers.optimizers import OptimizerLayout
from lightning_pipes.trainer.plan.settings import Settings
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.processes import process_rank, whole_group
from lightning_pipes.trainer.ranks.ranks import Grid, Ranks, RankStatus
from lightning_pipes.trainer.ranks.replicas import Replicas
from lightning_pipes.trainer.ranks.threads import Threads
from lightning_pipes.trainer.reports.timing import Share, Timing
from lightning_pipes.trainer.verify.verifier import Verifier

_log = logging.getLogger(__name__)


class StepCount:
    """Counts the optimizer steps of this rank.

    The count shows whether the checkpoint parts that ranks write after a failure belong together. The weights of a rank
    are the weights after a whole number of steps, unless the rank fails within a step.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._parameters: list[torch.Tensor] = []
        self._versions: list[int] = []

    @contextmanager
    def count_step(self) -> Iterator[None]:
        """Count the step that the block takes, unless it raises."""
        yield
        self._steps += 1
        self._parameters, self._versions = [], []

    def follow(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a wrapper of `closure` that records the versions of the parameters before the optimizer steps."""

        def compute() -> Any:
            result = closure()
            self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self._versions = [p._version for p in self._parameters]
            return result

        return compute

    def describe(self) -> str:
        """Return a text that is equal on all ranks that have taken the same steps.

        Within a step, the text is different on each rank.
        """
        if self._versions == [p._version for p in self._parameters]:
            return f"after {self._steps} steps"
        return f"in step {self._steps + 1} of rank {process_rank()}"


class Session:
    """Holds connections and common decisions from one call of `setup_environment` of a strategy to the next.

    Args:
        ranks: the position of this rank, and the control channels to the other ranks.
        connections: the connections to the other ranks.
        status: the status of this rank.
        replicas: the replicas of the pipeline.
        checkpointing: saves and loads the states of all ranks.

    Attributes:
        cut: the module after it was cut. None before this and after the run.
        layouts: for each optimizer, the parameters of the whole module that this rank steps.
        active_run: the current run, or None before and after a run.
        step_count: counts the optimizer steps of this rank.
        verifier: compares the first batches with training in one process, or None.
    """

    def __init__(
        self,
        ranks: Ranks,
        connections: Connections,
        status: RankStatus,
        replicas: Replicas,
        checkpointing: Checkpointing,
    ) -> None:
        self.ranks, self.connections, self.status = ranks, connections, status
        self.replicas, self.checkpointing = replicas, checkpointing
        self.cut: ModuleCut | None = None
        self.layouts: list[OptimizerLayout] = []
        self.active_run: ActiveRun | None = None
        self.verifier: Verifier | None = None
        self.step_count = StepCount()

    @property
    def control(self) -> Control:
        """The control channel of all ranks."""
        return self.ranks.control

    def barrier(self, name: str | None) -> None:
        """Wait for all ranks if ranks wait for each other at the barrier of this name."""
        if self.connections.waits_at(name):
            self.control.barrier()

    def reduce_decision(self, decision: bool, all: bool) -> bool:
        """Return whether all ranks, or any of them, made this decision."""
        return not self.control.any(not decision)[0] if all else self.control.any(decision)[0]

    def gather_timing(self, own: Share) -> Timing:
        """Return how the time of a window was spent on all ranks of the pipeline."""
        return Timing.from_shares(self.ranks.pipeline.all_gather(own), self.connections.n_siblings == 1)


class SessionStart:
    """Opens the connections of this rank to the other ranks.

    Args:
        trainer: the Trainer whose run begins.
        grid: the position of this rank.
        device: the device of this rank.
        environment: the cluster environment that started the processes.
        local_size: the number of ranks on this node.
        settings: the arguments of the strategy.

    Attributes:
        connections: the connections to the other ranks. They must be released even if `connect` fails.
        status: the status of this rank.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        grid: Grid,
        device: torch.device,
        environment: ClusterEnvironment,
        local_size: int,
        settings: Settings,
    ) -> None:
        self._trainer, self._grid, self._device, self._settings = trainer, grid, device, settings
        self._environment, self._local_size = environment, local_size
        self._needs_process_group = not dist.is_initialized()
        if self._needs_process_group:
            self._open_store()
        elif process_rank() >= grid.size:
            raise PlanError(
                f"this process is rank {process_rank()} of a process group of {whole_group().size()}, but the Trainer "
                f"has only {grid.size} process(es). Give the Trainer the number of processes, or, in the workers of "
                "Ray Train, use lightning_pipes.ray.RayPipelineStrategy"
            )
        self.connections = make_connections(trainer, grid.rank, grid.size, self._make_watch)
        self.status = RankStatus(self.connections.report_failure)

    def connect(self, threads: Threads, writing: CheckpointWriter) -> Session:
        """Connect this rank with the other ranks. This method is collective."""
        grid, settings = self._grid, self._settings
        if self._needs_process_group:
            self._make_process_group()
        control = self.connections.connect(self._make_control)
        threads.share_cores(control)
        ranks = Ranks(grid, self._device, control, control.split(grid.pipelines))
        self.connections.connect_eagerly(ranks.pipeline)
        module = self._trainer.lightning_module
        replicas = Replicas(grid, control, self._device, has_mesh=is_overridden("configure_model", module))
        private.set_device_mesh(module, replicas.mesh)
        checkpointing = Checkpointing(ranks, settings.checkpoint == "sharded", writing, self.status)
        broadcast_random_state(control, self._device)
        _log.debug("connect: rank %d of %d", grid.rank, grid.size)
        return Session(ranks, self.connections, self.status, replicas, checkpointing)

    def _open_store(self) -> None:
        """Create the store in which the ranks meet. This is called if no process group exists yet."""
        os.environ["MASTER_ADDR"] = self._environment.main_address
        os.environ["MASTER_PORT"] = str(self._environment.main_port)
        rank, size = self._grid.rank, self._grid.size
        if size > 1:
            run_store(rank, size, self._local_size, self._settings.timeout, StartupWatch().check)

    def _make_watch(self) -> FailureWatch:
        """Return the watch that detects failures of other ranks through the common store."""
        rank, size, store = self._grid.rank, self._grid.size, None
        if size > 1:
            store = current_store() or adopt_store(whole_group().get_group_store(), rank, size, self._local_size)
        settings = self._settings
        return FailureWatch(
            store,
            rank,
            size,
            settings.heartbeat_timeout,
            store_host=store_host(),
            ended=exited_ranks,
            setup_seconds=settings.timeout.total_seconds(),
        )

    def _make_process_group(self) -> None:
        """Create the default process group once all ranks have joined."""
        watch, device, timeout = self.connections.watch, self._device, self._settings.timeout
        watch.wait_for_ranks(timeout.total_seconds(), StartupWatch().check)
        fault_point("process_group")
        atexit.register(_destroy_process_groups)
        watch.call(
            partial(
                private.init_distributed,
                self._environment,
                self._settings.process_group_backend or dist.get_default_backend_for_device(device),
                timeout=timeout,
                device_id=device if device.type != "cpu" else None,
                store=keep_store(watch.sub_store()) if self._grid.size > 1 else HashStore(),
            )
        )
        fault_point("process_group.made")

    def _make_control(self, watch: FailureWatch, idle: Idle) -> Control:
        return Control(range(self._grid.size), watch, self._settings.timeout, idle=idle)


def _destroy_process_groups() -> None:
    """Destroy the process groups before the interpreter exits. Otherwise, the threads of gloo would abort the process.

    If a collective was given up, its group is kept, because destroying the group would wait for the collective.
    """
    fault_point("exit")
    private.hide_default_group(whole_group())  # a run may have ended without a teardown
    if has_given_up():
        leak_until_exit(private.process_groups())
        skip_final_gc()
    elif dist.is_initialized():
        dist.destroy_process_group()


NEWEST_TESTED_TORCH = (2, 14)
"""The newest version of torch that the tests use. A newer version may be installed."""


@cache
def warn_if_untested(version: str = torch.__version__) -> None:
    """Show one message on rank 0 if torch is newer than the tested version."""
    if tuple(int(part) for part in version.split(".")[:2]) > NEWEST_TESTED_TORCH:
        rank_zero_info(
            f"lightning_pipes was tested with torch {NEWEST_TESTED_TORCH[0]}.{NEWEST_TESTED_TORCH[1]} and older, and "
            f"this is {version}; if "
            f"something fails inside of torch, try torch {NEWEST_TESTED_TORCH[0]}.{NEWEST_TESTED_TORCH[1]}"
        )
