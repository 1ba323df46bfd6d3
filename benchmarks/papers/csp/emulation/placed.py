"""Subnets on stages: which blocks each stage has, and what that takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from benchmarks.papers.csp.emulation.spaces import Array, Subnets
from lightning_pipes.ir import PlanError, check_count


@dataclass(frozen=True, eq=False)
class Placed:
    """Subnets with the stage of each block.

    Attributes:
        cuts: the block at which each stage begins, a row for each subnet; the last column is the number of blocks.
    """

    subnets: Subnets
    cuts: Array

    @property
    def stages(self) -> int:
        """Stages, each on a rank of its own."""
        return int(self.cuts.shape[1]) - 1

    @cached_property
    def stage_of(self) -> Array:
        """The stage of each block, a row for each subnet."""
        blocks = np.arange(self.subnets.blocks)
        return np.asarray((blocks[None, :, None] >= self.cuts[:, None, 1:]).sum(axis=2))

    @cached_property
    def forward(self) -> Array:
        """Nanoseconds of each stage's forward of a whole batch, a row for each subnet."""
        return _sums(self.subnets.forward, self.cuts)

    @cached_property
    def backward(self) -> Array:
        """The same for backwards."""
        return _sums(self.subnets.backward, self.cuts)


def balanced(subnets: Subnets, stages: int) -> Placed:
    """Each subnet cut for itself (S3.2): consecutive blocks, so that the slowest stage is as fast as can be. Of equal
    ones every cut, from the last to the first, is as far left as can be, and no stage is empty.

    A layer may then be on another stage for another subnet, which gets its parameters by layer mirroring (S4.2).

    Raises:
        PlanError: fewer blocks than stages.
    """
    _check(subnets, stages)
    n, blocks = len(subnets), subnets.blocks
    ends = np.zeros((n, blocks + 1), np.int64)
    np.cumsum(subnets.forward + subnets.backward, axis=1, out=ends[:, 1:])
    slowest = ends.copy()  # of the best cut of the first blocks into so many stages
    chosen = np.zeros((stages + 1, n, blocks + 1), np.int64)
    for stage in range(2, stages + 1):
        now = np.full_like(slowest, np.iinfo(np.int64).max)
        for end in range(stage, blocks + 1):
            begins = slice(stage - 1, end)
            cases = np.maximum(slowest[:, begins], ends[:, end, None] - ends[:, begins])
            best = cases.argmin(axis=1)
            chosen[stage, :, end] = best + stage - 1
            now[:, end] = cases[np.arange(n), best]
        slowest = now
    cuts = np.full((n, stages + 1), blocks, np.int64)
    for stage in range(stages, 0, -1):
        cuts[:, stage - 1] = chosen[stage, np.arange(n), cuts[:, stage]]
    return Placed(subnets, cuts)


def fixed(subnets: Subnets, stages: int) -> Placed:
    """The same blocks on a stage for all subnets, as many on each as can be: no layer is ever on another stage.

    Raises:
        PlanError: fewer blocks than stages.
    """
    _check(subnets, stages)
    cuts = np.array([stage * subnets.blocks // stages for stage in range(stages + 1)], np.int64)
    return Placed(subnets, np.tile(cuts, (len(subnets), 1)))


def _check(subnets: Subnets, stages: int) -> None:
    check_count("stages", stages)
    if stages > subnets.blocks:
        raise PlanError(f"{subnets.blocks} blocks can't fill {stages} stages; use fewer stages")


def _sums(times: Array, cuts: Array) -> Array:
    ends = np.zeros((len(times), times.shape[1] + 1), np.int64)
    np.cumsum(times, axis=1, out=ends[:, 1:])
    return np.diff(np.take_along_axis(ends, cuts, axis=1), axis=1)
