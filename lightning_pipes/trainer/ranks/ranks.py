"""This rank and the others of its run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lightning_pipes.ir import PipelineError, PlanError
from lightning_pipes.trainer.ranks.control import Control


@dataclass(frozen=True)
class Grid:
    """All ranks by replica, by position in a pipeline with its last stage first, and by tensor-parallel shard.

    Consecutive global ranks hold the shards of one stage. Ranks of one replica and one shard form a pipeline.

    Attributes:
        rank: the global rank that asks.
        shards: tensor-parallel ranks of each stage.
        degrees: ranks of each stage, where one pipeline has stages with several; empty where each has one.

    Raises:
        PlanError: the ranks can't be shared out evenly.
    """

    replicas: int
    size: int
    rank: int
    shards: int = 1
    degrees: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.degrees and self.size != sum(self.degrees):
            raise PlanError(
                f"data_parallel={list(self.degrees)} takes {sum(self.degrees)} processes, and there are {self.size}; "
                "give each stage its number of processes, and start as many as these are together (devices x nodes)"
            )
        each = self.replicas * self.shards
        if self.size % each:
            shards = f" of tensor_parallel={self.shards}" if self.shards > 1 else ""
            raise PlanError(
                f"{self.size} processes can't be shared out to data_parallel={self.replicas} pipelines{shards}; "
                f"take a multiple of {each} (devices x nodes)"
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Replicas, ranks of one pipeline, and shards."""
        return self.replicas, self.length, self.shards

    @property
    def length(self) -> int:
        """Ranks of one pipeline."""
        return self.size // (self.replicas * self.shards)

    @property
    def n_planned(self) -> int:
        """Ranks of one pipeline as planners see them: the ranks of a stage count as one."""
        return len(self.degrees) or self.length

    @property
    def replica(self) -> int:
        """The number of this rank's replica."""
        return self.replica_of(self.rank)

    def replica_of(self, rank: int) -> int:
        """Return the number of the replica that has a global rank."""
        return rank // (self.length * self.shards)

    @property
    def position(self) -> int:
        """This rank's position among the global ranks of its pipeline."""
        return self.rank // self.shards % self.length

    @property
    def shard(self) -> int:
        """The number of this rank's tensor-parallel shard."""
        return self.rank % self.shards

    @property
    def is_in_first_pipeline(self) -> bool:
        """Whether this rank's pipeline is the first, which writes what all pipelines have."""
        return self.rank in self.pipelines[0]

    @property
    def pipeline(self) -> tuple[int, ...]:
        """The global ranks of this rank's pipeline, ascending."""
        return self.pipelines[self.replica * self.shards + self.shard]

    @property
    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """The global ranks of every pipeline, by replica and by shard."""
        whole = self.length * self.shards
        return tuple(
            tuple(range(replica * whole + shard, (replica + 1) * whole, self.shards))
            for replica in range(self.replicas)
            for shard in range(self.shards)
        )

    def on_all_replicas(self, positions: tuple[int, ...], shard: int | None = None) -> tuple[int, ...]:
        """Return the global ranks at these positions of all pipelines of a shard, ascending; of this rank's shard by
        default."""
        pipelines = self.pipelines[self.shard if shard is None else shard :: self.shards]
        return tuple(sorted(pipeline[position] for pipeline in pipelines for position in positions))


@dataclass(frozen=True)
class Ranks:
    """The ranks of a session: from `setup_environment` of a strategy until the next one.

    Attributes:
        grid: where this rank is among the replicas and stages.
        device: of this rank.
        control: collectives of all ranks.
        pipeline: collectives of the ranks of this rank's pipeline.
    """

    grid: Grid
    device: torch.device
    control: Control
    pipeline: Control


class RankStatus:
    """The status of this rank in its run.

    Args:
        report: tells the other ranks of an error.

    Attributes:
        error: what this rank ends by; None while it goes on.
    """

    def __init__(self, report: Callable[[BaseException], None]) -> None:
        self.error: BaseException | None = None
        self._report = report

    def report_failure(self, error: BaseException) -> None:
        """Tell the other ranks that this rank ends by `error`."""
        self.error = self.error or error
        self._report(error)

    @contextmanager
    def report_errors(self) -> Iterator[None]:
        """Tell the other ranks at once of an exception in the block."""
        try:
            yield
        except BaseException as error:
            self.report_failure(error)
            raise

    def check(self) -> None:
        """Raise PipelineError if a step of this run has failed and its caller goes on."""
        if self.error is not None:
            raise PipelineError(
                f"a step of this run has ended in {type(self.error).__name__}, and ranks can't continue together after "
                "that. If BatchSizeFinder tried a batch size that is too large, set the one before it, or end the "
                "search there by max_trials"
            ) from self.error
