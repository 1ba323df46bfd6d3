"""How many micro-batches a subnet's batch has."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_pipes.ir import Plan
from lightning_pipes.planning.planner import EvenPlanner, Planner, Problem

MICROBATCHES = 1
"""The number where nobody says one. On real layers a whole batch is fastest: smaller pieces use a device less well, and
each piece costs messages and Python again. Subnets overlap already, so micro-batches are not needed to fill stages."""


@dataclass(frozen=True)
class SubnetPlanner(Planner):
    """Cuts batches evenly into as many micro-batches on any number of stages.

    Gradients are then summed in the same order, and weights are equal to the bit. For the same reason the number does
    not depend on measured times, which differ from run to run. More micro-batches pay where a layer that all subnets
    step makes them wait for each other, and where one micro-batch still fills a device; pass them as `microbatches`.
    """

    def plan(self, problem: Problem) -> Plan:
        return EvenPlanner().plan(replace(problem, microbatches=problem.microbatches or MICROBATCHES))

    def profile_sizes(self, rows: int, stages: int, microbatches: int | None) -> tuple[int, ...]:
        return super().profile_sizes(rows, stages, microbatches or MICROBATCHES)
