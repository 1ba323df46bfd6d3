"""Balance layers across stages by measured time, if this is sufficiently faster than the even cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from lightning_pipes.cost import Cluster, Deployment, Device, ModelProfile
from lightning_pipes.cost.units import seconds_text
from lightning_pipes.ir import Kind, Plan, PlanError, Policy, Schedule, Span
from lightning_pipes.planning.fit import (
    edge_seconds,
    evaluate_plan,
    fit_layers,
    order_and_held_rows,
    reduce_peak,
    stage_seconds,
)
from lightning_pipes.planning.partition import balanced_partitions
from lightning_pipes.planning.planner import Planner, Problem, Solution

MIN_CUT_GAIN = 0.05
"""The share of a step that another cut must save to replace the fallback. Layers are measured only once, within about a
second, so smaller differences are not reliable."""
EQUAL_STEP_TOLERANCE = 0.02
"""Steps whose durations differ by at most this share count as equally fast. Among these, the cut with the smallest peak
memory is chosen."""


@dataclass(frozen=True)
class BalancedPlanner(Planner):
    """Balances the layers of the plans of another planner by time, within the memory of the devices.

    The balanced cut replaces the fallback of the problem only if it saves a sufficient share of the step. The layers
    are not changed if there is no profile or no fallback, or if the layers are already decided. This planner is used
    when a run begins and when its layers are cut again; the `inner` planner plans batches of other sizes.

    Attributes:
        inner: the planner that makes the plans.
    """

    inner: Planner
    wants_profile: ClassVar[bool] = True

    @property
    def may_cut_unequally(self) -> bool:
        return self.inner.may_cut_unequally

    @property
    def uses_profile(self) -> bool:
        return self.inner.uses_profile

    @property
    def has_memory_limit(self) -> bool:
        return self.inner.has_memory_limit

    def plan(self, problem: Problem) -> Plan:
        return self.solve(problem).plan

    def solve(self, problem: Problem) -> Solution:
        if problem.profile is None or problem.layers or not problem.fallback:
            return self.inner.solve(problem)
        solution = self.inner.solve(replace(problem, fallback=()))
        plan, schedule = solution.plan, solution.problem.schedule
        deployment = solution.problem.deployment or Deployment(Cluster((Device(),) * problem.ranks))
        balance = balance_layers if schedule.flushes else balance_stream
        found = balance(problem.profile, schedule, plan, problem.fallback, deployment)
        return Solution(
            replace(solution.problem, layers=found.layers, fallback=problem.fallback),
            replace(plan, layers=found.layers),
            "\n".join(filter(None, [solution.why, found.why])),
        )

    def profile_sizes(self, rows: int, stages: int, microbatches: int | None) -> tuple[int, ...]:
        return self.inner.profile_sizes(rows, stages, microbatches)

    def most_rows(self, rows: int, stages: int, microbatches: int | None) -> int:
        return self.inner.most_rows(rows, stages, microbatches)


@dataclass(frozen=True)
class Balance:
    """The layers of each stage.

    Attributes:
        layers: the layers of each stage.
        seconds: the simulated duration of a step.
        why: an explanation for the user.
    """

    layers: tuple[Span, ...]
    seconds: float
    why: str


def balance_stream(
    profile: ModelProfile, schedule: Schedule | Policy, plan: Plan, even: Sequence[Span], deployment: Deployment
) -> Balance:
    """Return the cut that minimizes the maximum time over stages and messages, for a schedule that does not flush.

    This maximum determines the throughput of a full pipeline. The result is `even` if the best cut does not save
    enough.

    Args:
        profile: the seconds and bytes of the layers.
        schedule: the schedule of the plan.
        plan: the plan to cut.
        even: the layers of each stage that are kept unless another cut saves enough.
        deployment: the devices and links.
    """
    loads = stage_seconds(profile, plan, deployment.pipeline)
    edges = edge_seconds(profile, plan, deployment.pipeline)
    m = len(plan.spans(Kind.F, 0))

    def step(layers: Sequence[Span]) -> float:
        stages = (
            float(load.seconds(np.array(span.start), np.array(span.stop)))
            for load, span in zip(loads, layers, strict=True)
        )
        return m * max(*stages, *(float(edges[span.start]) for span in layers[1:]))

    best = balanced_partitions(loads, edges, slacks=(1.0,))[0]
    at, now = [span.start for span in even[1:]], step(even)
    kept = _describe_kept_cut(at)
    if not math.isfinite(now) or step(best) > now * (1 - MIN_CUT_GAIN):
        return Balance(tuple(even), now, f"{kept}. No other cut is at least {MIN_CUT_GAIN:.0%} faster")
    return Balance(
        best,
        step(best),
        f"Stages begin at layers {[span.start for span in best[1:]]}. In a full pipeline, a batch takes an estimated "
        f"{seconds_text(1e9 * step(best))}, compared with {seconds_text(1e9 * now)} for the cut by parameters ({at})",
    )


def balance_layers(
    profile: ModelProfile, schedule: Schedule | Policy, plan: Plan, even: Sequence[Span], deployment: Deployment
) -> Balance:
    """Return the fastest cut within the memory of the devices, or `even` if the fastest cut does not save enough.

    If several cuts are nearly as fast as the fastest one, the result is the cut whose fullest rank needs the least
    memory. Only cuts that can be reached by moving one layer at a time are considered for this.

    If no cut fits according to the profile, `even` is kept: the user asked for this run, and it may fit after all.

    Args:
        profile: the seconds and bytes of the layers.
        schedule: the schedule of the plan.
        plan: the plan to cut.
        even: the layers of each stage that are kept unless another cut saves enough.
        deployment: the devices and links.

    Raises:
        PlanError: the schedule does not flush between batches, so there is no step to simulate.
    """
    order, _ = order_and_held_rows(schedule, plan)
    before = evaluate_plan(profile, order, replace(plan, layers=tuple(even)), deployment)
    limits = [device.memory for device in deployment.pipeline.devices]
    fits = all(limit is None or size <= limit for size, limit in zip(before.peak_bytes, limits, strict=True))
    at = [span.start for span in even[1:]]
    kept = _describe_kept_cut(at)
    try:
        best = fit_layers(profile, schedule, plan, deployment)
    except PlanError as error:
        if fits:
            raise
        return Balance(tuple(even), before.seconds, f"{kept}: {error}")
    if fits and best.seconds > before.seconds * (1 - MIN_CUT_GAIN):
        now, then = seconds_text(1e9 * before.seconds), seconds_text(1e9 * best.seconds)
        other = f", compared with {then} for the fastest cut ({best.cuts})" if best.cuts != at else ""
        return Balance(tuple(even), before.seconds, f"{kept}. A step takes an estimated {now}{other}")
    slowest = min(best.seconds * (1 + EQUAL_STEP_TOLERANCE), before.seconds * (1 - MIN_CUT_GAIN) if fits else math.inf)
    best = reduce_peak(profile, best, slowest, deployment)
    saved = f", compared with {seconds_text(1e9 * before.seconds)} for the cut by parameters ({at})"
    return Balance(
        best.plan.layers,
        best.seconds,
        f"Stages begin at layers {best.cuts}. A step takes an estimated {seconds_text(1e9 * best.seconds)}"
        + (saved if fits else f". The cut by parameters ({at}) does not fit into memory"),
    )


def _describe_kept_cut(starts: list[int]) -> str:
    return f"The cut by parameters is kept (stages begin at layers {starts})"
