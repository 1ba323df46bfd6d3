"""The strategy as its callbacks see it, and what callbacks have in common."""

from __future__ import annotations

from abc import abstractmethod

import lightning.pytorch as pl
from lightning.pytorch.strategies import ParallelStrategy

from lightning_pipes.engine.residency.layer_memory import StateMemory
from lightning_pipes.ir import PipelineError, Policy, Schedule
from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.plan.decision import Decision
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.ranks import Grid
from lightning_pipes.trainer.reports.timing import Timing


class PipelineHost(ParallelStrategy):
    """The part of `PipelineStrategy` that callbacks of this package and the report use.

    Attributes:
        schedule: orders the batches from the next one on.
        memory: keeps layers off the device until a batch uses them, from the next run on; None where all stay on it.
    """

    schedule: Schedule | Policy
    memory: StateMemory | None = None

    @property
    @abstractmethod
    def grid(self) -> Grid:
        """Where this rank is among the replicas and stages."""

    @property
    @abstractmethod
    def control(self) -> Control:
        """The collective calls over all ranks."""

    @property
    @abstractmethod
    def current_run(self) -> PipelineRun:
        """The run under way."""

    @property
    @abstractmethod
    def decision(self) -> Decision:
        """The decision of the last run."""

    @abstractmethod
    def adopt_decision(self, decision: Decision) -> None:
        """Run by a decision from now on."""

    @property
    @abstractmethod
    def flushes(self) -> bool:
        """Whether all stages end a batch before the next one begins."""

    @abstractmethod
    def last_timing(self) -> Timing | None:
        """Return where the time of the last window went. Collective."""


class PipelineCallback(pl.Callback):
    """A callback that works with PipelineStrategy only."""

    def pipeline(self, trainer: pl.Trainer) -> PipelineHost:
        """Return the trainer's strategy.

        Raises:
            PipelineError: it is no PipelineStrategy.
        """
        strategy = trainer.strategy
        if not isinstance(strategy, PipelineHost):
            raise PipelineError(
                f"{type(self).__name__} needs PipelineStrategy; this trainer has {type(strategy).__name__}. Set "
                "strategy=PipelineStrategy(...), or leave the callback out"
            )
        return strategy
