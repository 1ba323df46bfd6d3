"""A process joins the others of its run: their store, their watch, torch's process group."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment

from lightning_pipes.engine.private_torch import default_store
from lightning_pipes.engine.watch.failure import FailureWatch
from lightning_pipes.engine.watch.fault_points import fault_point
from lightning_pipes.engine.watch.launcher import StartupWatch, exited_ranks
from lightning_pipes.engine.watch.process_exit import has_given_up, leak_until_exit, skip_final_gc
from lightning_pipes.engine.watch.rendezvous import store_host
from lightning_pipes.engine.watch.shared_store import (
    adopt_store,
    current_store,
    keep_store,
    run_store,
    single_process_store,
)
from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.loop.connections import Idle
from lightning_pipes.trainer.ranks.control import Control


@dataclass(frozen=True)
class Joining:
    """How this process finds the others.

    Attributes:
        environment: who started them.
        rank: of this process.
        size: how many there are.
        here: how many of them are on this node.
        timeout: how long ranks wait for each other.
        heartbeat_timeout: seconds without a sign of life after which a rank is given up.
    """

    environment: ClusterEnvironment
    rank: int
    size: int
    here: int
    timeout: timedelta
    heartbeat_timeout: float

    def open_store(self) -> None:
        """Where there is no process group yet, the ranks get a store to meet in."""
        os.environ["MASTER_ADDR"] = self.environment.main_address
        os.environ["MASTER_PORT"] = str(self.environment.main_port)
        if self.size > 1:
            run_store(self.rank, self.size, self.here, self.timeout, StartupWatch().check)

    def watch(self) -> FailureWatch:
        """Sees failures of other ranks, in the store that they have."""
        store = None
        if self.size > 1:
            store = current_store() or adopt_store(default_store(), self.rank, self.size, self.here)
        return FailureWatch(store, self.rank, self.size, self.heartbeat_timeout, store_host=store_host())

    def make_process_group(self, watch: FailureWatch, device: torch.device, backend: str | None) -> None:
        """Makes the default one, once all ranks have come."""
        watch.wait_for_ranks(self.timeout.total_seconds(), StartupWatch().check, exited_ranks)
        fault_point("process_group")
        atexit.register(_leave)
        watch.call(
            partial(
                private.init_distributed,
                self.environment,
                backend or private.default_backend(device),
                timeout=self.timeout,
                device_id=device if device.type != "cpu" else None,
                store=keep_store(watch.sub_store()) if self.size > 1 else single_process_store(),
            )
        )
        fault_point("process_group.made")

    def control(self, watch: FailureWatch, idle: Idle) -> Control:
        """The control through which all ranks tell each other things."""
        return Control(range(self.size), watch, self.timeout, idle=idle)


def _leave() -> None:
    """Destroys the process groups before the interpreter ends: gloo's threads abort the process otherwise. Not where
    one of them may sit on a collective that was given up: who destroys its group waits for it."""
    fault_point("exit")
    if has_given_up():
        leak_until_exit(private.process_groups())
        skip_final_gc()
    elif private.distributed_is_initialized():
        dist.destroy_process_group()
