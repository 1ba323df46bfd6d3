"""How many micro-batches a subnet's batch has."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_pipes.ir import Plan
from lightning_pipes.planning.planner import EvenPlanner, Planner, Problem

MICROBATCHES = 8
"""Where nobody says how many. On 4, 8 and 16 stages it has at least 0.9, 0.84 and 0.77 of the throughput of the best
number, in simulations of the paper's spaces; nearly all of it where layers are rarely shared."""


@dataclass(frozen=True)
class SubnetPlanner(Planner):
    """The same even cut on every stage, into as many micro-batches on any number of stages: gradients are then summed
    in the same order, and weights are the same to the bit.

    For the same reason it does not go by measured times, which differ from run to run. The fastest number for a
    space comes from simulations, as in benchmarks/papers/csp/emulation/systems.py; pass it as `microbatches`.
    """

    def plan(self, problem: Problem) -> Plan:
        return EvenPlanner().plan(replace(problem, microbatches=problem.microbatches or MICROBATCHES))

    def profile_sizes(self, rows: int, stages: int, microbatches: int | None) -> tuple[int, ...]:
        return super().profile_sizes(rows, stages, microbatches or MICROBATCHES)
