"""Planner of the settings that a schedule v leaves open: its durations, and the largest k that fits into memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

from lightning_pipes.cost import Cluster, Deployment, Device, ModelProfile
from lightning_pipes.cost.units import bytes_text
from lightning_pipes.ir import Kind, Plan, PlanError, adapt_plan
from lightning_pipes.planning.fit import Fit, edge_seconds, evaluate_plan, fit_layers
from lightning_pipes.planning.planner import EvenPlanner, Problem, Solution
from lightning_pipes.strategies.v.schedule import V

DURATION_UNITS = 24
"""The number of units that F, I and W of a stage take together. Orders for nearly equal durations are then the same."""


@dataclass(frozen=True)
class VPlanner(EvenPlanner):
    """Cuts batches evenly, and chooses what the schedule leaves open if there is a profile.

    The durations are those of the profile. With a memory limit, k is the largest one with which a partition of the
    layers fits into this limit and into the devices.

    Attributes:
        memory_limit: the bytes that a rank may hold, in addition to the limit of its device. None means no such limit.
    """

    memory_limit: int | None = None

    @property
    def uses_profile(self) -> bool:
        return True

    @property
    def has_memory_limit(self) -> bool:
        return self.memory_limit is not None

    def solve(self, problem: Problem) -> Solution:
        """Return the plan, and a problem whose schedule has all settings.

        Raises:
            PlanError: not even the smallest k fits into the memory limit.
        """
        schedule = problem.schedule
        assert isinstance(schedule, V)
        if problem.profile is None:
            return super().solve(problem)
        deployment = problem.deployment or Deployment(Cluster((Device(),) * problem.ranks))
        plan = adapt_plan(self.plan(problem), schedule)
        times = schedule.times or measured_times(problem.profile, plan, deployment.pipeline)
        schedule = replace(schedule, times=times)
        why = "Schedule 'v' is ordered for F, I, W and messages with relative times of {}, {}, {} and {}".format(*times)
        if self.memory_limit is not None:
            problem = replace(problem, schedule=schedule)
            schedule, deployment = _largest_fit(problem, plan, deployment, self.memory_limit)
            why += f". The largest k that fits into {bytes_text(self.memory_limit)} is {schedule.k}"
        solution = super().solve(replace(problem, schedule=schedule, deployment=deployment))
        return replace(solution, why=why)


def measured_times(profile: ModelProfile, plan: Plan, cluster: Cluster) -> tuple[int, int, int, int]:
    """Return the relative durations of F, I and W of an average stage, and of a message on the slowest link.

    Args:
        profile: the seconds and bytes of the layers.
        plan: the plan. Its layers are not used.
        cluster: the devices and links.
    """
    rows = max(span.rows for span in plan.spans(Kind.F, 0))
    slowness = sum(1 / device.speed for device in cluster.devices[: plan.n_ranks]) / plan.n_ranks

    def average(kind: Kind) -> float:
        return profile.overhead + float(profile.layer_arrays.seconds_at(kind, rows).sum()) * slowness / plan.n_stages

    if plan.split_backward and profile.has_split:
        forward, inputs, weights = average(Kind.F), average(Kind.I), average(Kind.W)
    else:
        forward, inputs = average(Kind.F), average(Kind.B) / 2
        weights = inputs
    inputs += forward * max(map(plan.recomputed_share, range(plan.n_stages)))
    unit = (forward + inputs + weights) / DURATION_UNITS
    if unit <= 0:
        return 1, 1, 1, 0
    links = [cluster.link_between(a, b) for a, b, _ in plan.directed_links]
    message = float(edge_seconds(profile, plan, cluster)[1:-1].mean()) + max(link.latency for link in links)
    computations = (max(1, round(each / unit)) for each in (forward, inputs, weights))
    times = (*computations, round(message / unit))
    divisor = gcd(*times)
    return times[0] // divisor, times[1] // divisor, times[2] // divisor, times[3] // divisor


def _largest_fit(problem: Problem, plan: Plan, deployment: Deployment, memory_limit: int) -> tuple[V, Deployment]:
    """Return the schedule of the problem with the largest k that fits into memory, and devices with the memory limit.

    Raises:
        PlanError: not even the smallest k fits.
    """
    schedule, p = problem.schedule, problem.ranks
    assert isinstance(schedule, V)
    limited = deployment.with_memory_limit(memory_limit)
    limits = [memory_limit if each.memory is None else each.memory for each in limited.pipeline.devices]

    def with_k(k: int) -> V:
        return replace(schedule, k=k, memory_limit=None)

    def fits(k: int) -> bool:
        try:
            fit = _fit(problem, with_k(k), plan, limited)
        except PlanError:
            return False
        return all(size <= limit for size, limit in zip(fit.peak_bytes, limits, strict=False))

    low, high = V.least_held(p), max(V.least_held(p), 2 * p)
    if not fits(low):
        fit = _fit(problem, with_k(low), plan, deployment.with_memory_limit(None))
        rank = max(range(p), key=lambda r: fit.peak_bytes[r] - limits[r])
        raise PlanError(
            f"v: memory_limit allows {bytes_text(limits[rank])} on rank {rank}, and the order with the least memory "
            f"(V-Min, k={low}) needs {bytes_text(fit.peak_bytes[rank])}, of which "
            f"{bytes_text(fit.costs.resident_bytes(rank, plan))} are weights and states. Raise memory_limit, or use "
            "more ranks, more micro-batches, or recompute=True"
        )
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return with_k(low), limited


def _fit(problem: Problem, schedule: V, plan: Plan, deployment: Deployment) -> Fit:
    """Return the fit of the layers of the problem, or of the best partition if the problem has no layers."""
    assert problem.profile is not None
    if not problem.layers:
        return fit_layers(problem.profile, schedule, plan, deployment, trials=0)
    order = schedule.program(plan)
    return evaluate_plan(problem.profile, order, replace(plan, layers=problem.layers), deployment)
