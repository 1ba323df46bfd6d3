"""A planner that chooses the schedule, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from lightning_pipes.ir import Plan, Policy, Schedule
from lightning_pipes.planning.auto.choice import Choice
from lightning_pipes.planning.auto.search import choose_option
from lightning_pipes.planning.formatting import schedule_label
from lightning_pipes.planning.planner import Planner, Problem, Solution, planner_of
from lightning_pipes.sim.units import seconds_text


@dataclass(frozen=True)
class AutoPlanner(Planner):
    """The fastest schedule that is installed, with its micro-batches, recomputation and layers, by `choose_option`.

    A plan does not carry its schedule, so what is chosen is in the problem of the solution; `plan` chooses all but the
    schedule. Micro-batches that a problem asks for are kept to, and so is recomputation. Without a profile there is
    nothing to choose by, and the planner of the problem's schedule is asked.
    """

    wants_profile: ClassVar[bool] = True

    def plan(self, problem: Problem) -> Plan:
        return self._solved(problem, [problem.schedule]).plan

    def solve(self, problem: Problem) -> Solution:
        return self._solved(problem, None)

    def profile_sizes(self, rows: int, stages: int, microbatches: int | None) -> tuple[int, ...]:
        if microbatches is not None:
            return super().profile_sizes(rows, stages, microbatches)
        return tuple(sorted({max(1, n) for n in (1, rows // (4 * stages), -(-rows // stages))}))

    def most_rows(self, rows: int, stages: int, microbatches: int | None) -> int:
        if microbatches is not None:
            return super().most_rows(rows, stages, microbatches)
        return -(-rows // max(1, stages // 2))

    def _solved(self, problem: Problem, schedules: Sequence[Schedule | Policy] | None) -> Solution:
        profile, rows = problem.profile, problem.rows
        if profile is None:
            return planner_of(problem.schedule).solve(problem)
        choice = choose_option(
            profile,
            problem.ranks,
            rows,
            problem.deployment,
            schedules,
            microbatches=() if problem.microbatches is None else [min(problem.microbatches, rows)],
            recompute=(True,) if problem.recompute else (False, True),
            least=problem.least,
        )
        best, plan = choice.best, choice.fit.plan
        solved = replace(
            problem,
            schedule=best.schedule,
            microbatches=best.microbatches,
            recompute=best.recompute,
            layers=plan.layers,
        )
        return Solution(solved, plan, _reason(choice), str(choice))


def _reason(choice: Choice) -> str:
    best = choice.best
    again = ", recomputation" if best.recompute else ""
    return (
        f"schedule='auto' takes {schedule_label(best.schedule)} with {best.microbatches} micro-batches{again}, cut at "
        f"{choice.fit.cuts}: predicted {seconds_text(1e9 * choice.fit.seconds)} a step"
    )
