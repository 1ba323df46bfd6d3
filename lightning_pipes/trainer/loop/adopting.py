"""Changes of the plan during training: another order, or layers on other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_pipes.ir import PipelineError, Plan, PlanError, Policy, Schedule, Span, check_type
from lightning_pipes.planning.candidates import Candidate
from lightning_pipes.planning.formatting import schedule_settings
from lightning_pipes.trainer.checks import warn_about_microbatch_effects
from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.plan.plans import Plans
from lightning_pipes.trainer.plan.settings import AUTO, check_microbatches, find_schedule
from lightning_pipes.trainer.ranks.control import Control


def adopt_plan(
    run: PipelineRun,
    control: Control,
    schedule: str | Schedule | Policy,
    microbatches: int | None = None,
    plan: Plan | None = None,
) -> None:
    """Use another plan for the batches after the current one, as `PipelineStrategy.adopt` does. Collective.

    Args:
        run: the run of this training.
        control: the collectives of all ranks.
        schedule: the name of a schedule, or a schedule or policy, whose order is used from then on.
        microbatches: number of micro-batches per batch. By default, it is the number that the user gave the strategy,
            or the default of the schedule.
        plan: how batches of the size of this plan are cut, or None if they are cut evenly.

    Raises:
        PlanError: stages or layers that cannot move would have to move, or only one of the two schedules flushes
            between batches.
        PipelineError: the ranks request different plans.
    """
    if isinstance(schedule, str) and schedule == AUTO:
        raise PlanError("schedule='auto' is chosen when training starts; adopt a schedule by its name, or an object")
    check_type("plan", plan, Plan | None)
    schedule = find_schedule(schedule, {})
    plans = run.plans.for_schedule(schedule, check_microbatches(microbatches), plan)
    if plan is not None and plan.layers:
        run.local_layers.check_placement(plan.layers)
    mine = (schedule.name, schedule_settings(schedule), plans.microbatches, plan)
    for rank, theirs in zip(control.ranks, control.all_gather(mine), strict=True):
        if theirs != mine:
            raise PipelineError(
                f"this rank adopts {mine[:3]}, but rank {rank} adopts {theirs[:3]}. All ranks must adopt the same "
                "schedule, number of micro-batches and plan. Choose them from values that are the same on all ranks, "
                "such as strategy.last_timing()"
            )
    _change(run, plans)


def adopt_candidate(run: PipelineRun, chosen: Candidate) -> None:
    """Adopt a candidate that one rank has chosen, verified and broadcast. It is not verified again.

    Batches of the size of its plan are cut by that plan. Layers stay on their ranks.

    Raises:
        PlanError: see `PipelineStrategy.adopt`.
    """
    plan = replace(chosen.plan, layers=())
    _change(run, run.plans.for_schedule(chosen.schedule, chosen.n_microbatches, plan, verified=plan.jobs[0].rows))


def adopt_cut(run: PipelineRun, layers: Sequence[Span], rows: int) -> None:
    """Adopt a cut that all ranks have agreed on, which assigns layers to stages from the next batch on.

    Batches of `rows` samples keep their micro-batches.

    Raises:
        PlanError: layers that cannot move would have to move.
    """
    if tuple(layers) != run.plans.layers:
        plan, _ = run.plans.for_rows(rows)
        run.local_layers.check_placement(layers)
        _change(run, run.plans.for_schedule(run.plans.schedule, given=replace(plan, layers=tuple(layers))))


def _change(run: PipelineRun, plans: Plans) -> None:
    if run.plans.microbatches == 1 < plans.microbatches:
        warn_about_microbatch_effects(run.cut.full)
    run.plans = plans
