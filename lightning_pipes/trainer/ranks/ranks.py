"""This rank and the other ranks of its run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from lightning_pipes.ir import PipelineError, PlanError
from lightning_pipes.trainer.ranks.control import Control


@dataclass(frozen=True)
class Grid:
    """The coordinates of all ranks: the replica, the position in a pipeline, and the tensor-parallel shard.

    Position 0 has the last stage of the pipeline. Consecutive global ranks hold the shards of one stage. The ranks of
    one replica and one shard form a pipeline.

    Attributes:
        replicas: the number of replicas of the pipeline.
        size: the number of all ranks.
        rank: the global rank of this process.
        shards: the number of tensor-parallel ranks of each stage.
        degrees: the number of ranks of each stage, if a single pipeline has stages with several ranks. Empty if each
            stage has one rank.

    Raises:
        PlanError: the ranks can't be divided evenly.
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
                f"{self.size} processes can't be divided among data_parallel={self.replicas} pipelines{shards}. "
                f"Use a multiple of {each} (devices x nodes)"
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """The number of replicas, the number of ranks of one pipeline, and the number of shards."""
        return self.replicas, self.length, self.shards

    @property
    def length(self) -> int:
        """The number of ranks of one pipeline."""
        return self.size // (self.replicas * self.shards)

    @property
    def n_planned(self) -> int:
        """The number of ranks of one pipeline as planners see it, where all ranks of a stage count as one."""
        return len(self.degrees) or self.length

    @property
    def replica(self) -> int:
        """The number of this rank's replica."""
        return self.replica_of(self.rank)

    def replica_of(self, rank: int) -> int:
        """Return the number of the replica of a global rank."""
        return rank // (self.length * self.shards)

    @property
    def position(self) -> int:
        """The position of this rank among the ranks of its pipeline."""
        return self.rank // self.shards % self.length

    @property
    def shard(self) -> int:
        """The number of this rank's tensor-parallel shard."""
        return self.rank % self.shards

    @property
    def is_in_first_pipeline(self) -> bool:
        """Whether this rank is in the first pipeline, which writes everything that all pipelines have in common."""
        return self.rank in self.pipelines[0]

    @property
    def pipeline(self) -> tuple[int, ...]:
        """The global ranks of this rank's pipeline, ascending."""
        return self.pipelines[self.replica * self.shards + self.shard]

    @property
    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """The global ranks of every pipeline, ordered by replica, then by shard."""
        whole = self.length * self.shards
        return tuple(
            tuple(range(replica * whole + shard, (replica + 1) * whole, self.shards))
            for replica in range(self.replicas)
            for shard in range(self.shards)
        )

    def on_all_replicas(self, positions: tuple[int, ...], shard: int | None = None) -> tuple[int, ...]:
        """Return the global ranks at these positions in the pipelines of all replicas, ascending.

        Args:
            positions: positions in a pipeline.
            shard: the shard of the pipelines; by default the shard of this rank.
        """
        pipelines = self.pipelines[self.shard if shard is None else shard :: self.shards]
        return tuple(sorted(pipeline[position] for pipeline in pipelines for position in positions))


@dataclass(frozen=True)
class Ranks:
    """The ranks of a session, which lasts from one `setup_environment` of a strategy to the next.

    Attributes:
        grid: the coordinates of this rank.
        device: the device of this rank.
        control: the collectives of all ranks.
        pipeline: the collectives of the ranks of this rank's pipeline.
    """

    grid: Grid
    device: torch.device
    control: Control
    pipeline: Control


class RankStatus:
    """The status of this rank in its run.

    Args:
        report: reports an error to the other ranks.

    Attributes:
        error: the error that ends this rank; None while it runs.
    """

    def __init__(self, report: Callable[[BaseException], None]) -> None:
        self.error: BaseException | None = None
        self._report = report

    def report_failure(self, error: BaseException) -> None:
        """Report to the other ranks that `error` ends this rank."""
        self.error = self.error or error
        self._report(error)

    @contextmanager
    def report_errors(self) -> Iterator[None]:
        """Report an exception in the block to the other ranks immediately."""
        try:
            yield
        except BaseException as error:
            self.report_failure(error)
            raise

    def check(self) -> None:
        """Check that no step of this run has failed.

        Raises:
            PipelineError: a step has failed, and its caller tries to continue.
        """
        if self.error is not None:
            raise PipelineError(
                f"a step of this run failed with {type(self.error).__name__}, and ranks can't continue together after "
                "that. If BatchSizeFinder tried a batch size that is too large, set the one before it, or end the "
                "search there by max_trials"
            ) from self.error
