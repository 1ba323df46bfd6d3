"""Replicas of a pipeline: which global rank is where."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_pipes.ir import PlanError


@dataclass(frozen=True)
class Grid:
    """`replicas` pipelines of `stages` ranks each; consecutive global ranks form one, its last stage first.

    Attributes:
        rank: the global rank that asks.

    Raises:
        PlanError: the ranks can't be shared out evenly.
    """

    replicas: int
    size: int
    rank: int

    def __post_init__(self) -> None:
        if self.size % self.replicas:
            raise PlanError(
                f"{self.size} processes can't be shared out to data_parallel={self.replicas} pipelines; "
                f"take a multiple of {self.replicas} (devices x nodes)"
            )

    @property
    def length(self) -> int:
        """Ranks of one pipeline."""
        return self.size // self.replicas

    @property
    def replica(self) -> int:
        """The number of this rank's pipeline."""
        return self.rank // self.length

    @property
    def position(self) -> int:
        """This rank's position among the global ranks of its pipeline."""
        return self.rank % self.length

    @property
    def pipeline(self) -> tuple[int, ...]:
        """The global ranks of this rank's pipeline, ascending."""
        return self.pipelines[self.replica]

    @property
    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """The global ranks of every pipeline."""
        return tuple(tuple(range(r * self.length, (r + 1) * self.length)) for r in range(self.replicas))

    def on_all_replicas(self, positions: tuple[int, ...]) -> tuple[int, ...]:
        """Return the global ranks at these positions of all pipelines, ascending."""
        return tuple(sorted(pipeline[position] for pipeline in self.pipelines for position in positions))
