"""A complete third-party schedule in one folder: stages and directions divide a batch differently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

from lightning_pipes.ir import STEP, B, Cut, F, Kind, Plan, Program, Schedule, Span
from lightning_pipes.planning.planner import Planner, Problem


@dataclass(frozen=True)
class Uneven(Schedule):
    """All forwards followed by all backwards, for any division of the batch on each stage."""

    name: ClassVar[str] = "uneven"

    def make_planner(self) -> object:
        return UnevenPlanner()

    def program(self, plan: Plan) -> Program:
        return Program(
            tuple(
                (
                    *(F(stage, span) for span in plan.spans(Kind.F, stage)),
                    *(B(stage, span) for span in plan.spans(Kind.B, stage)),
                    STEP(stage),
                )
                for stage in range(plan.n_stages)
            )
        )


class UnevenPlanner(Planner):
    """A planner that divides a batch into quarters.

    On stage 0, forwards have 2 + 2 quarters and backwards 1 + 1 + 2. On all other stages, they have 1 + 3 and 3 + 1.
    """

    def plan(self, problem: Problem) -> Plan:
        stages = len(problem.schedule.place_stages(problem.ranks))
        forward = [(2, 2), *[(1, 3)] * (stages - 1)]
        backward = [(1, 1, 2), *[(3, 1)] * (stages - 1)]
        cut = Cut(
            problem.rows,
            tuple(quarters(problem.rows, parts) for parts in forward),
            tuple(quarters(problem.rows, parts) for parts in backward),
        )
        return Plan(tuple(range(stages)), (cut,), layers=problem.layers)


def quarters(rows: int, parts: Sequence[int]) -> tuple[Span, ...]:
    """Return spans with the given numbers of quarters, rounded to whole samples, without empty spans."""
    ends = [0, *(rows * part // 4 for part in accumulate(parts))]
    return tuple(Span(a, b) for a, b in pairwise(ends) if a < b)
