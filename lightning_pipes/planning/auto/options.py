"""The options there are to train: schedules, numbers of micro-batches, recomputation, and what keeps some out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from lightning_pipes.cost import Deployment, ModelProfile
from lightning_pipes.ir import MAX_FORWARDS, Kind, Plan, PlanError, Policy, Schedule
from lightning_pipes.ir.registry import installed_schedules
from lightning_pipes.planning.auto.choice import Option
from lightning_pipes.planning.bounds import step_bound
from lightning_pipes.planning.planner import Problem, solve_plan

MOST_TRIED = 2**15
"""Forwards of a batch on all ranks, in what is tried: more take long to simulate, and gain next to nothing."""
POLICY_SIZE = 30_000
"""Computations of the largest step that is simulated with a policy which nobody has named."""


def installed_variants(ranks: int, microbatches: int) -> Iterator[Schedule | Policy]:
    """Every installed schedule with the settings that it says are worth a try: `Traits.list_variants`."""
    for entry in installed_schedules().values():
        yield from entry.load().list_variants(ranks, microbatches)


def most_microbatches(ranks: int, rows: int) -> int:
    """Return the most micro-batches that are tried: one for each sample, or as many as can be simulated in reasonable
    time."""
    return max(1, min(rows, max(2 * ranks, MOST_TRIED // ranks), MAX_FORWARDS // ranks))


def numbers_to_try(ranks: int, rows: int) -> list[int]:
    """Numbers of micro-batches: from about the number of ranks up, doubling, to `most_microbatches`."""
    found, most = [1], most_microbatches(ranks, rows)
    while found[-1] < most:
        found.append(found[-1] * 2)
    return [m for m in [*found[:-1], min(found[-1], most)] if m >= min(ranks, most) // 2]


def list_options(
    profile: ModelProfile,
    ranks: int,
    rows: int,
    deployment: Deployment,
    schedules: Sequence[Schedule | Policy] | None,
    numbers: Iterable[int],
    recompute: Sequence[bool],
) -> Iterator[Option]:
    """Every combination, each with a step time that it can't beat."""
    bounds: dict[tuple[object, ...], float] = {}
    for m in numbers:
        for schedule in schedules if schedules is not None else installed_variants(ranks, m):
            for again in recompute:
                too_large = True  # where not even stages can be placed
                try:
                    too_large = len(schedule.place_stages(ranks)) * m > MAX_FORWARDS
                    plan = solve_plan(Problem(schedule, ranks, rows, m, again, profile=profile, deployment=deployment))
                except PlanError as error:
                    yield Option(schedule, m, again, None, math.inf, why_not=str(error), too_large=too_large)
                    continue
                why_not = _impossible(profile, plan)
                too_large = not why_not and schedules is None and _is_slow(schedule, plan)
                if too_large:
                    why_not = (
                        f"{_computations(plan)} computations take long to simulate where no order is fixed; name the "
                        "schedule to insist"
                    )
                key = plan.ranks, plan.jobs, again, plan.split_backward, schedule.flushes
                if not why_not and key not in bounds:  # which is of batches that don't overlap
                    bounds[key] = step_bound(profile, plan, deployment) if schedule.flushes else 0.0
                yield Option.from_plan(schedule, plan, bounds.get(key, math.inf), why_not, too_large)


def _impossible(profile: ModelProfile, plan: Plan) -> str:
    """Why there is nothing to simulate, if so."""
    if len(profile.layers) < plan.n_stages:
        return f"{len(profile.layers)} layers can't fill {plan.n_stages} stages"
    if plan.split_backward and not profile.has_split:
        return "the profile has no times of I and W"
    return ""


def _is_slow(schedule: Schedule | Policy, plan: Plan) -> bool:
    """Whether to simulate a policy would take long."""
    return not isinstance(schedule, Schedule) and _computations(plan) > POLICY_SIZE


def _computations(plan: Plan) -> int:
    return 2 * plan.n_stages * len(plan.spans(Kind.F, 0))
