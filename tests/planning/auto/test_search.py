"""The planner that chooses the schedule asks the same question as everybody, and answers with more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_pipes.cost import Deployment
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.auto import AutoPlanner, choose_option
from lightning_pipes.planning.planner import Problem, solve_plan
from lightning_pipes.testing.generators import random_problem


def problem(seed: int, **known: object) -> Problem:
    p = random_problem(seed)
    asked = Problem(make_schedule("1f1b"), p.ranks, p.rows, profile=p.profile, deployment=Deployment(p.cluster))
    return replace(asked, **known)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(2))
def test_a_solution_is_the_best_choice(seed: int) -> None:
    asked = problem(seed)
    assert asked.profile is not None
    choice = choose_option(asked.profile, asked.ranks, asked.rows, asked.deployment)
    found = AutoPlanner().solve(asked)
    solved = found.problem
    assert (solved.schedule, found.plan) == (choice.best.schedule, choice.fit.plan)
    assert (solved.microbatches, solved.recompute, solved.layers) == (
        choice.best.microbatches,
        choice.best.recompute,
        choice.fit.plan.layers,
    )
    assert found.table == str(choice)
    assert "schedule='auto' takes" in found.why


def test_the_problem_of_a_solution_has_its_plan() -> None:
    """So batches of other sizes are asked for by it alone."""
    found = AutoPlanner().solve(problem(1))
    assert solve_plan(found.problem) == found.plan


def test_a_plan_alone_is_for_the_schedule_of_the_problem() -> None:
    asked = problem(1, schedule=make_schedule("gpipe"))
    assert asked.profile is not None
    choice = choose_option(asked.profile, asked.ranks, asked.rows, asked.deployment, [asked.schedule])
    assert AutoPlanner().plan(asked) == choice.fit.plan


def test_what_is_asked_for_is_kept() -> None:
    found = AutoPlanner().solve(problem(0, microbatches=2, recompute=True)).problem
    assert (found.microbatches, found.recompute) == (2, True)
    assert not AutoPlanner().solve(problem(0, deployment=None)).problem.recompute  # with room for all it costs time
    assert AutoPlanner().solve(problem(0, deployment=None, recompute=True)).problem.recompute
    assert all(rows <= 8 for rows in AutoPlanner().profile_sizes(32, 4, 4))
    assert AutoPlanner().most_rows(32, 4, 4) == 8


def test_micro_batches_on_which_the_model_does_not_run_are_left_out() -> None:
    asked = problem(0, deployment=None)
    assert AutoPlanner().solve(replace(asked, least=asked.rows)).problem.microbatches == 1


def test_without_a_profile_the_schedule_stays() -> None:
    asked = problem(0, profile=None)
    assert AutoPlanner().solve(asked).plan == solve_plan(asked)
