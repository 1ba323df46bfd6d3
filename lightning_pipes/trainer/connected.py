"""This rank and the others of its run, connected; and what they decide together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import ClusterEnvironment

from lightning_pipes.trainer import private_lightning as private
from lightning_pipes.trainer.checkpoint.writing import Writing
from lightning_pipes.trainer.checkpointing import Checkpointing
from lightning_pipes.trainer.loop.connections import Connections, connections
from lightning_pipes.trainer.loop.joining import Joining
from lightning_pipes.trainer.loop.standing import Standing
from lightning_pipes.trainer.module.equal_starts import broadcast_random_state
from lightning_pipes.trainer.plan.settings import Settings
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.grid import Grid
from lightning_pipes.trainer.ranks.ranks import Ranks
from lightning_pipes.trainer.ranks.replicas import Replicas
from lightning_pipes.trainer.ranks.threads import Threads
from lightning_pipes.trainer.reports.timing import Share, Timing


@dataclass(frozen=True)
class Meeting:
    """The ranks of a run before they are connected: what each of them goes by.

    Attributes:
        here: how many of them are on this node.
        standing: of this rank.
    """

    grid: Grid
    device: torch.device
    environment: ClusterEnvironment
    here: int
    settings: Settings
    standing: Standing

    def join(self, trainer: pl.Trainer) -> tuple[Connections, Callable[[Threads, Writing], Connected]]:
        """The connections of a training, as yet without anybody at their other ends, and a function that connects
        them. Where that fails they have to be left, too.
        """
        grid, settings = self.grid, self.settings
        joining = Joining(
            self.environment, grid.rank, grid.size, self.here, settings.timeout, settings.heartbeat_timeout
        )
        started = not private.distributed_is_initialized()
        if started:
            joining.open_store()
        links = connections(trainer, grid.rank, grid.size, joining.watch)
        self.standing.connected(links.fail)

        def connect(threads: Threads, writing: Writing) -> Connected:
            if started:
                joining.make_process_group(links.watch, self.device, settings.backend)
            control = links.connect(joining.control)
            threads.share_cores(control)
            ranks = Ranks(grid, self.device, control, control.split(grid.pipelines))
            links.get_ready(ranks.pipeline)
            replicas = Replicas(grid, control, self.device)
            private.set_device_mesh(trainer.lightning_module, replicas.mesh)
            checkpointing = Checkpointing(ranks, settings.sharded, writing, self.standing)
            broadcast_random_state(control, self.device)
            return Connected(links, ranks, replicas, checkpointing)

        return links, connect


@dataclass(frozen=True)
class Connected:
    """From `setup_environment` of a strategy to the next one. Every stage holds the same values, so averages are over
    replicas.

    Attributes:
        links: to the other ranks.
    """

    links: Connections
    ranks: Ranks
    replicas: Replicas
    checkpointing: Checkpointing

    @property
    def control(self) -> Control:
        """Of all ranks."""
        return self.ranks.control

    def barrier(self, name: str | None) -> None:
        """Waits for all ranks, where they wait for each other at the barrier of that name."""
        if self.links.waits_at(name):
            self.control.barrier()

    def decide(self, decision: bool, all: bool) -> bool:
        """Whether all ranks, or any of them, decide so."""
        return not self.control.any(not decision)[0] if all else self.control.any(decision)[0]

    def timing(self, own: Share) -> Timing:
        """Where the time of a window went on all ranks of the pipeline."""
        return Timing.of(self.ranks.pipeline.all_gather(own), self.links.trainings == 1)
