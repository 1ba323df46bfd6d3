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
from lightning_pipes.engine.watch.ending import has_given_up, hurry, never_destroy
from lightning_pipes.engine.watch.failure import FailureWatch
from lightning_pipes.engine.watch.launcher import Company, dead_ranks
from lightning_pipes.engine.watch.meeting import adopted_store, kept, lone_store, made_store, run_store
from lightning_pipes.engine.watch.points import point
from lightning_pipes.engine.watch.rendezvous import store_host
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
            run_store(self.rank, self.size, self.here, self.timeout, Company().check)

    def watch(self) -> FailureWatch:
        """Sees failures of other ranks, in the store that they have."""
        store = None
        if self.size > 1:
            store = made_store() or adopted_store(default_store(), self.rank, self.size, self.here)
        return FailureWatch(store, self.rank, self.size, self.heartbeat_timeout, store_host=store_host())

    def make_process_group(self, watch: FailureWatch, device: torch.device, backend: str | None) -> None:
        """Makes the default one, once all ranks have come."""
        watch.meet(self.timeout.total_seconds(), Company().check, dead_ranks)
        point("process_group")
        atexit.register(_leave)
        watch.call(
            partial(
                private.init_distributed,
                self.environment,
                backend or private.default_backend(device),
                timeout=self.timeout,
                device_id=device if device.type != "cpu" else None,
                store=kept(watch.store()) if self.size > 1 else lone_store(),
            )
        )
        point("process_group.made")

    def control(self, watch: FailureWatch, idle: Idle) -> Control:
        """The control through which all ranks tell each other things."""
        return Control(range(self.size), watch, self.timeout, idle=idle)


def _leave() -> None:
    """Destroys the process groups before the interpreter ends: gloo's threads abort the process otherwise. Not where
    one of them may sit on a collective that was given up: who destroys its group waits for it."""
    point("exit")
    if has_given_up():
        never_destroy(private.process_groups())
        hurry()
    elif private.distributed_is_initialized():
        dist.destroy_process_group()
