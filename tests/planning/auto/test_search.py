"""Check the planner that chooses the schedule: it solves the same problem as other planners and decides more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_pipes.cost import Cluster, Deployment, Device, LayerProfile, ModelProfile
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.auto import AutoPlanner, choice, choose_option
from lightning_pipes.planning.planner import Problem, solve_plan
from lightning_pipes.strategies.umpipe.planner import UnequalPlanner
from lightning_pipes.testing.generators import random_problem


def problem(seed: int, **known: object) -> Problem:
    p = random_problem(seed)
    asked = Problem(make_schedule("1f1b"), p.ranks, p.rows, profile=p.profile, deployment=Deployment(p.cluster))
    return replace(asked, **known)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(2))
def test_a_solution_is_the_best_choice(seed: int) -> None:
    asked = problem(seed)
    assert asked.profile is not None
    chosen = choose_option(asked.profile, asked.ranks, asked.rows, asked.deployment)
    found = AutoPlanner().solve(asked)
    solved = found.problem
    assert (solved.schedule, found.plan) == (chosen.best.schedule, chosen.fit.plan)
    assert (solved.microbatches, solved.recompute, solved.layers) == (
        chosen.best.microbatches,
        chosen.best.recompute,
        chosen.fit.plan.layers,
    )
    assert found.table == str(chosen)
    assert "schedule='auto' selected" in found.why


def test_the_problem_of_a_solution_has_its_plan() -> None:
    """Check that the problem of a solution determines its plan.

    Batches of other sizes are then planned from this problem alone.
    """
    found = AutoPlanner().solve(problem(1))
    assert solve_plan(found.problem) == found.plan


def test_the_problem_of_a_solution_with_unequal_micro_batches_has_its_plan() -> None:
    """Check that the number of micro-batches of the first stage, which is the smallest one here, limits no others."""

    def layer(name: str, seconds: float, of_sample: float) -> LayerProfile:
        forward = (0, 0.0), (1, seconds + of_sample), (8, seconds + 8 * of_sample)
        return LayerProfile(name, forward, tuple((rows, 2 * each) for rows, each in forward))

    layers = [layer(str(n), *((0.004, 0.0) if n < 3 else (0.0, 0.001))) for n in range(6)]
    deployment = Deployment(Cluster((Device(),) * 3))
    asked = Problem(make_schedule("1f1b"), 3, 24, profile=ModelProfile(tuple(layers)), deployment=deployment)
    found = AutoPlanner().solve(asked)
    assert [len(spans) for spans in found.plan.jobs[0].forward] == [1, 1, 1, 24, 24, 24]
    assert solve_plan(found.problem) == found.plan


def test_a_plan_alone_is_for_the_schedule_of_the_problem() -> None:
    asked = problem(1, schedule=make_schedule("gpipe"))
    assert asked.profile is not None
    chosen = choose_option(asked.profile, asked.ranks, asked.rows, asked.deployment, [asked.schedule])
    assert AutoPlanner().plan(asked) == chosen.fit.plan


def test_unequal_cuts_are_left_out_if_they_are_not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = problem(1, deployment=None)
    assert asked.profile is not None
    unequal = solve_plan(
        replace(asked, schedule=make_schedule("umpipe", forward=(2,) * asked.ranks, backward=(1,) * asked.ranks))
    )
    assert len(unequal.jobs[0].distinct_spans) == 2
    plan = UnequalPlanner.plan
    monkeypatch.setattr(
        UnequalPlanner,
        "plan",
        lambda self, each: unequal if each.schedule.name == "umpipe" else plan(self, each),
    )
    schedules = [asked.schedule, make_schedule("umpipe")]

    deployment = Deployment(Cluster((Device(),) * asked.ranks))

    def list_reasons(equal_cuts: bool) -> dict[str, str]:
        options = choice.list_options(
            asked.profile, asked.ranks, asked.rows, deployment, schedules, [4], (False,), None, equal_cuts
        )
        return {option.schedule.name: option.why_not for option in options}

    refused = "stages or links cut a batch into different micro-batches, which this module does not allow"
    assert list_reasons(True) == {asked.schedule.name: "", "umpipe": refused}
    schedules[1] = make_schedule("um1f1b")  # this plan is equal, but the planner may cut other batches unequally
    assert list_reasons(True) == {asked.schedule.name: "", "um1f1b": refused}
    schedules[1] = make_schedule("umpipe")
    assert list_reasons(False) == {asked.schedule.name: "", "umpipe": ""}


def test_given_settings_are_kept() -> None:
    found = AutoPlanner().solve(problem(0, microbatches=2, recompute=True)).problem
    assert (found.microbatches, found.recompute) == (2, True)
    # recomputation costs time, and there is enough memory
    assert not AutoPlanner().solve(problem(0, deployment=None)).problem.recompute
    assert AutoPlanner().solve(problem(0, deployment=None, recompute=True)).problem.recompute
    assert all(rows <= 8 for rows in AutoPlanner().profile_sizes(32, 4, 4))
    assert AutoPlanner().most_rows(32, 4, 4) == 8


def test_micro_batches_on_which_the_model_does_not_run_are_left_out() -> None:
    asked = problem(3, deployment=None)
    assert AutoPlanner().solve(replace(asked, least=asked.rows)).problem.microbatches == 1


def test_without_a_profile_the_schedule_stays() -> None:
    asked = problem(0, profile=None)
    assert AutoPlanner().solve(asked).plan == solve_plan(asked)
