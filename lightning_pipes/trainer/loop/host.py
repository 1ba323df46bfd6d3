"""The interface of the strategy that callbacks use, and a base class of callbacks."""

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
    """The part of `PipelineStrategy` that the callbacks of this package and the report use.

    Attributes:
        schedule: orders the batches, beginning with the next one.
        memory: moves layers to the device when a batch uses them, beginning with the next run. With None, all layers
            stay on the device.
    """

    schedule: Schedule | Policy
    memory: StateMemory | None = None

    @property
    @abstractmethod
    def grid(self) -> Grid:
        """The position of this rank among the replicas and stages."""

    @property
    @abstractmethod
    def control(self) -> Control:
        """The collectives of all ranks."""

    @property
    @abstractmethod
    def current_run(self) -> PipelineRun:
        """The current run."""

    @property
    @abstractmethod
    def decision(self) -> Decision:
        """The decision of the last run."""

    @abstractmethod
    def adopt_decision(self, decision: Decision) -> None:
        """Use a decision from now on."""

    @property
    @abstractmethod
    def flushes(self) -> bool:
        """Whether all stages finish a batch before the next batch begins."""

    @abstractmethod
    def last_timing(self) -> Timing | None:
        """Return how the time of the last window was spent, or None if there is no window yet. Collective."""


class PipelineCallback(pl.Callback):
    """A callback that works with PipelineStrategy only."""

    def pipeline(self, trainer: pl.Trainer) -> PipelineHost:
        """Return the strategy of the trainer.

        Raises:
            PipelineError: it is not a PipelineStrategy.
        """
        strategy = trainer.strategy
        if not isinstance(strategy, PipelineHost):
            raise PipelineError(
                f"{type(self).__name__} needs PipelineStrategy; this trainer has {type(strategy).__name__}. Set "
                "strategy=PipelineStrategy(...), or leave the callback out"
            )
        return strategy
