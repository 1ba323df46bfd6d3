"""Another plan while training goes on: another order, or layers on other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_pipes.ir import PipelineError, Plan, PlanError, Policy, Schedule, Span, check_type
from lightning_pipes.planning.candidates import Candidate
from lightning_pipes.planning.formatting import schedule_settings
from lightning_pipes.trainer.loop.run import PipelineRun
from lightning_pipes.trainer.module.checks import warn_about_microbatch_effects
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
    """Run the batches after this one by another plan, as `PipelineStrategy.adopt` does. Collective.

    Raises:
        PlanError: stages would have to move, or layers that can't, or one schedule flushes between batches and the
            other does not.
        PipelineError: the ranks want different things.
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
                f"this rank adopts {mine[:3]}, and rank {rank} {theirs[:3]}; all ranks must adopt the same, so decide "
                "by what they have in common, such as strategy.last_timing()"
            )
    _change(run, plans)


def adopt_candidate(run: PipelineRun, chosen: Candidate) -> None:
    """Adopt a candidate that one rank has chosen, verified and broadcast; it is not verified again.

    Batches of its plan's size are cut by that plan. Layers stay where they are.

    Raises:
        PlanError: see `PipelineStrategy.adopt`.
    """
    plan = replace(chosen.plan, layers=())
    _change(run, run.plans.for_schedule(chosen.schedule, chosen.n_microbatches, plan, verified=plan.jobs[0].rows))


def adopt_cut(run: PipelineRun, layers: Sequence[Span], rows: int) -> None:
    """Adopt a cut that all ranks know: the layers of the stages from the next batch on.

    Batches of `rows` samples keep their micro-batches.

    Raises:
        PlanError: layers would move that can't.
    """
    if tuple(layers) != run.plans.layers:
        plan, _ = run.plans.for_rows(rows)
        run.local_layers.check_placement(layers)
        _change(run, run.plans.for_schedule(run.plans.schedule, given=replace(plan, layers=tuple(layers))))


def _change(run: PipelineRun, plans: Plans) -> None:
    if run.plans.microbatches == 1 < plans.microbatches:
        warn_about_microbatch_effects(run.cut.full)
    run.plans = plans
