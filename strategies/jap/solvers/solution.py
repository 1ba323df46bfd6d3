"""A solver's order, and a bound on how good it is."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_pipes.strategies.jap.problem import Array, ArrayProblem


@dataclass(frozen=True, eq=False)
class Solution:
    """An order of an array's blocks.

    Attributes:
        starts: nanoseconds by block number.
        makespan: nanoseconds of the iteration.
        bound: nanoseconds that no order can beat.
        method: what found it.
        tried: how many orders were timed, or nodes expanded.
    """

    problem: ArrayProblem
    starts: Array
    makespan: int
    bound: int
    method: str
    tried: int = 1

    @property
    def gap(self) -> float:
        """How much longer it may be than the best: 0.02 is 2 %, and 0 means that nothing is better."""
        return self.makespan / self.bound - 1

    @property
    def order(self) -> Array:
        """Block numbers in the order in which each stage runs them, of shape (stages, 2 jobs)."""
        return self.problem.order_of(self.starts)
