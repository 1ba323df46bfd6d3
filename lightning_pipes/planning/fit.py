"""Fit layers to ranks: find the partition with the shortest simulated step within the memory of the devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from lightning_pipes.cost import FREE_LINK, Cluster, CostModel, Deployment, Device, Link, ModelProfile
from lightning_pipes.cost.deployment import as_deployment
from lightning_pipes.ir import Kind, Plan, PlanError, Policy, Program, Schedule, Span
from lightning_pipes.planning.memory import cannot_fit, held_rows, peak_bytes, stage_bytes
from lightning_pipes.planning.partition import Indices, Seconds, StageLoad, balanced_partitions, range_sums
from lightning_pipes.sim import makespan, simulate

Array = npt.NDArray[np.float64]
MAX_FIT_FORWARDS = 200_000
"""The number of forwards that one search may simulate. The number of trials is therefore smaller for large plans, but
it is at least `MIN_FIT_TRIALS`."""
MIN_FIT_TRIALS = 3


@dataclass(frozen=True)
class Fit:
    """The layers on each rank, and the resulting step time and memory.

    Attributes:
        plan: the plan with its layers.
        given: the order, or a schedule that creates it.
        costs: the seconds and bytes of the stages.
        seconds: the simulated duration of a step. If batches overlap, this is the duration per batch in a full
            pipeline.
        peak_bytes: the peak memory of each rank in bytes.
        is_limited: whether the partition with the most even stages does not fit into memory, so that fewer activations
            might make a step faster.
    """

    plan: Plan
    given: Program | Policy | Schedule
    costs: CostModel
    seconds: float
    peak_bytes: tuple[int, ...]
    is_limited: bool = False

    @property
    def order(self) -> Program | Policy:
        """The order of the plan. It is created on access if only the schedule is stored."""
        return self.given.program(replace(self.plan, layers=())) if isinstance(self.given, Schedule) else self.given

    @property
    def cuts(self) -> list[int]:
        """The layers at which stages 1, 2, ... begin, in the format of the argument `partition`."""
        return [span.start for span in self.plan.layers[1:]]

    @property
    def bubble(self) -> float:
        """The share of a step in which ranks idle, from 0 to 1."""
        return step_bubble(self.order, replace(self.plan, layers=()), self.costs)

    def without_order(self, schedule: Schedule | Policy) -> Fit:
        """Return the same fit with `schedule` in place of the order.

        The order of a large plan takes a hundred megabytes.
        """
        return replace(self, given=schedule)


def step_seconds(order: Program | Policy, plan: Plan, costs: CostModel) -> float:
    """Return the seconds of a step. If batches overlap, return the seconds per batch in a full pipeline.

    Args:
        order: the order of the step.
        plan: the plan without layers, so that the order is lowered only once for all partitions.
        costs: the seconds of the stages and links.
    """
    ends = [makespan(each, plan, costs) for each in finite_orders(order)]
    if isinstance(order, Program) and order.is_endless:
        return (ends[1] - ends[0]) / _count_batches(order) / 1e9
    return ends[0] / 1e9


def step_bubble(order: Program | Policy, plan: Plan, costs: CostModel) -> float:
    """Return the share of a step in which ranks idle, from 0 to 1. If batches overlap, the pipeline is full."""
    runs = [simulate(each, plan, costs) for each in finite_orders(order)]
    if len(runs) == 1:
        return sum(runs[0].bubble) / plan.n_ranks
    few, many = runs
    took = many.makespan - few.makespan
    return 1 - (sum(many.busy) - sum(few.busy)) / (plan.n_ranks * took) if took else 0.0


def finite_orders(order: Program | Policy) -> Sequence[Program | Policy]:
    """Return finite orders: the order itself, or two windows of an endless order.

    The first window is long enough to fill the pipeline, and the second one has twice the number of batches.
    """
    return _unroll_order(order) if isinstance(order, Program) and order.is_endless else (order,)


@lru_cache(maxsize=2)
def _unroll_order(order: Program) -> tuple[Program, Program]:
    return order.unroll(_count_batches(order)), order.unroll(2 * _count_batches(order))


def _count_batches(order: Program) -> int:
    return order.head_batches + len(order.head)


def fit_layers(
    profile: ModelProfile,
    schedule: Schedule | Policy,
    plan: Plan,
    cluster: Cluster | Deployment | None = None,
    trials: int = 60,
) -> Fit:
    """Return the fastest partition of the layers for `plan`. If the plan has layers, they are one of the candidates.

    Stages are balanced by the seconds of their layers on their devices, including messages. Several partitions, which
    trade balance for cheaper cuts, are simulated. Starting from the fastest one, cuts are then moved by one layer as
    long as this reduces the step time, in at most `trials` more simulations, or fewer if the plan is large. The memory
    of a device limits the activations that its stages hold between forward and backward in the order of the schedule.
    The gradients of replicas are averaged before each STEP.

    Args:
        profile: the seconds and bytes of the layers.
        schedule: the schedule that orders the plan.
        plan: the plan to cut.
        cluster: the devices of one pipeline, or a deployment with several replicas; by default devices without limits.
        trials: the largest number of simulations in which cuts are moved.

    Raises:
        PlanError: there are fewer layers than stages; the profile lacks times that the plan needs; batches overlap in
            an order that is not fixed; or no partition fits. In the last case, the message names the stage that lacks
            the most memory.
    """
    deployment = as_deployment(cluster or Cluster((Device(),) * plan.n_ranks))
    n = len(profile.layers)
    if n < plan.n_stages:
        raise PlanError(f"{n} layers can't fill {plan.n_stages} stages. Use fewer ranks, or fewer stages on each rank")
    if plan.split_backward and not profile.has_split:
        raise PlanError(
            "the profile has no times of I and W, the two parts of a backward; measure them with split=True, or choose "
            "a schedule with full backwards"
        )
    if not isinstance(schedule, Schedule) and schedule.is_endless:
        raise PlanError(
            f"{schedule.name} orders overlapping batches while they run, so there is no step to plan; choose "
            "another schedule"
        )
    order, held = order_and_held_rows(schedule, plan)
    loads = stage_seconds(profile, plan, deployment.pipeline)
    edges = edge_seconds(profile, plan, deployment.pipeline)
    candidates: list[tuple[Span, ...]] = []
    if not cannot_fit(profile, plan, deployment.pipeline, held):
        candidates = balanced_partitions(_limit_loads(profile, plan, deployment.pipeline, held, loads), edges)
        # the memory share of each stage is only an estimate, so partitions without this limit are tried too
        if plan.n_stages > plan.n_ranks:
            candidates += balanced_partitions(loads, edges)
    if not candidates:
        raise PlanError(
            _explain_lacking(profile, order, plan, deployment, balanced_partitions(loads, edges, slacks=(1.0,))[0])
        )
    if plan.layers:
        candidates.insert(0, plan.layers)
    found = [
        fit
        for layers in list(dict.fromkeys(candidates))[: _count_trials(order, plan)]
        if (fit := _evaluate_layers(profile, order, replace(plan, layers=layers), deployment)) is not None
    ]
    if not found:
        raise PlanError(_explain_lacking(profile, order, plan, deployment, candidates[0]))
    best = improve_cuts(profile, min(found, key=lambda fit: fit.seconds), deployment, trials)
    if all(device.memory is None for device in deployment.pipeline.devices[: plan.n_ranks]):
        return best
    (even, *_) = balanced_partitions(loads, edges, slacks=(1.0,))
    return replace(best, is_limited=all(fit.plan.layers != even for fit in found))


def improve_cuts(profile: ModelProfile, fit: Fit, cluster: Cluster | Deployment, trials: int = 60) -> Fit:
    """Return the plan with cuts moved by one layer as long as this reduces the step time.

    At most `trials` partitions are simulated, or fewer if the plan is large. The stages with the highest load give away
    layers first.
    """
    return _move_cuts(profile, fit, as_deployment(cluster), trials, lambda other, best: other.seconds < best.seconds)


def reduce_peak(
    profile: ModelProfile, fit: Fit, slowest: float, cluster: Cluster | Deployment, trials: int = 60
) -> Fit:
    """Return the plan with cuts moved by one layer as long as this reduces the memory of the fullest rank.

    Args:
        profile: the seconds and bytes of the layers.
        fit: the partition to begin with.
        slowest: the largest allowed duration of a step in seconds.
        cluster: the devices of one pipeline, or a deployment with several replicas.
        trials: the largest number of simulations.
    """

    def is_smaller(other: Fit, best: Fit) -> bool:
        return other.seconds <= slowest and max(other.peak_bytes) < max(best.peak_bytes)

    return _move_cuts(profile, fit, as_deployment(cluster), trials, is_smaller)


def _move_cuts(
    profile: ModelProfile, fit: Fit, deployment: Deployment, trials: int, is_better: Callable[[Fit, Fit], bool]
) -> Fit:
    seen = {fit.plan.layers}
    left = min(trials, _count_trials(fit.order, fit.plan))
    moved = True
    while moved:
        moved = False
        for layers in _list_neighbors(fit):
            if layers in seen:
                continue
            if not left:
                return fit
            left -= 1
            seen.add(layers)
            other = _evaluate_layers(profile, fit.order, replace(fit.plan, layers=layers), deployment)
            if other is not None and is_better(other, fit):
                fit, moved = other, True
                break
    return fit


def _count_trials(order: Program | Policy, plan: Plan) -> int:
    """Return the number of times that a step of `plan` may be simulated."""
    batches = 3 * _count_batches(order) if isinstance(order, Program) and order.is_endless else 1
    return max(
        MIN_FIT_TRIALS, MAX_FIT_FORWARDS // sum(batches * len(plan.spans(Kind.F, s)) for s in range(plan.n_stages))
    )


def _list_neighbors(fit: Fit) -> list[tuple[Span, ...]]:
    """Return all partitions with one cut moved by one layer and no empty stage, the heaviest giver first."""
    layers, costs = fit.plan.layers, fit.costs
    found = []
    for s, (a, b) in enumerate(pairwise(layers)):
        for giving, cut in ((s, a.stop - 1), (s + 1, a.stop + 1)):
            if a.start < cut < b.stop:
                rows = fit.plan.spans(Kind.F, giving)[0].rows
                load = sum(costs.seconds_at(kind, giving, rows) for kind in fit.plan.kinds_of_stage(giving))
                found.append((-load, (*layers[:s], Span(a.start, cut), Span(cut, b.stop), *layers[s + 2 :])))
    return [moved for _, moved in sorted(found)]


def order_and_held_rows(schedule: Schedule | Policy, plan: Plan) -> tuple[Program | Policy, tuple[int, ...]]:
    """Return the order, and for every stage the largest number of rows that it holds between F and B.

    The order of a policy is determined in a simulation with equal stages, in which a backward takes twice the time of a
    forward.
    """
    if isinstance(schedule, Schedule):
        program = schedule.program(plan)
        return program, held_rows(finite_orders(program)[-1], plan)  # type: ignore[arg-type]
    run = simulate(schedule, plan, CostModel.uniform(plan.n_stages, forward=1.0, backward=2.0))
    return schedule, held_rows(run.program(), plan)


def evaluate_plan(profile: ModelProfile, order: Program | Policy, plan: Plan, cluster: Cluster | Deployment) -> Fit:
    """Return the simulated step time and the memory of a plan with layers, without memory limits."""
    fit = _evaluate_layers(profile, order, plan, as_deployment(cluster), limited=False)
    assert fit is not None, "there was no limit"
    return fit


def _evaluate_layers(
    profile: ModelProfile, order: Program | Policy, plan: Plan, deployment: Deployment, limited: bool = True
) -> Fit | None:
    """Return the fit of a plan with layers, or None if a rank needs more memory than it has."""
    costs = price_stages(profile, plan, deployment)
    # the plan without layers is equal for all partitions, so the order is lowered only once
    bare = replace(plan, layers=())
    limits = [device.memory if limited else None for device in deployment.pipeline.devices[: plan.n_ranks]]

    def fits(peak: Sequence[int]) -> bool:
        return all(limit is None or size <= limit for size, limit in zip(peak, limits, strict=True))

    if isinstance(order, Program):
        peak = peak_bytes(finite_orders(order)[-1], bare, costs)  # type: ignore[arg-type]
        return Fit(plan, order, costs, step_seconds(order, bare, costs), peak) if fits(peak) else None
    timeline = simulate(order, bare, costs)
    peak = timeline.peak_bytes
    return Fit(plan, order, costs, timeline.makespan / 1e9, peak) if fits(peak) else None


def price_stages(profile: ModelProfile, plan: Plan, deployment: Deployment) -> CostModel:
    """Return the costs of the stages on their devices.

    A STEP includes the part of averaging the gradients that the last backward does not hide: buckets are sent while
    this backward is still running. The stages of one rank use the ring of the rank in turn.
    """
    speeds = [deployment.pipeline.devices[rank].speed for rank in plan.ranks]
    costs = profile.stage_costs(plan.layers, speeds)
    seconds = dict(costs.seconds)
    if deployment.replicas > 1:
        for stage, size in enumerate(profile.layer_arrays.stage_sums("averaged", plan.layers)):
            kind = Kind.W if plan.split_backward else Kind.B
            backward = costs.seconds_at(kind, stage, plan.spans(kind, stage)[-1].rows)
            left = float(deployment.exposed_seconds(plan.ranks[stage], np.array(size), np.array(backward)))
            seconds[Kind.STEP, stage] = ((0, costs.seconds_at(Kind.STEP, stage) + left),)
    return replace(costs, seconds=seconds, links=_select_links(plan, deployment.pipeline))


def stage_seconds(profile: ModelProfile, plan: Plan, cluster: Cluster) -> list[StageLoad]:
    """Return the load of each stage: the seconds of F and B of one micro-batch as a function of its layers.

    If a stage recomputes some micro-batches, its load is the mean of all of them. The load of a stage without layers is
    infinite. Equal stages share one object.
    """
    last = plan.n_stages - 1
    known: dict[tuple[object, ...], StageLoad] = {}
    found = []
    for stage, rank in enumerate(plan.ranks):
        rows = max(span.rows for span in plan.spans(Kind.F, stage))
        again = plan.recomputed_share(stage)
        speed = cluster.devices[rank].speed
        key = rows, again, speed, stage == 0, stage == last
        if key not in known:
            seconds = both_seconds(profile, plan, rows, again)
            ends = both_seconds(profile, plan, rows)
            known[key] = _build_stage_load(seconds[1:-1], (stage == 0) * ends[0], (stage == last) * ends[-1], speed)
        found.append(known[key])
    return found


def _build_stage_load(seconds: Array, before: float, after: float, speed: float) -> StageLoad:
    layers = range_sums(seconds)

    def load(begin: Indices, stop: Indices) -> Array:
        return np.where(begin < stop, (layers(begin, stop) + before + after) / speed, np.inf)

    return StageLoad(load)


def both_seconds(profile: ModelProfile, plan: Plan, rows: int, again: float = 0.0) -> Array:
    """Return the seconds of forward and backward for each part of the model.

    The first and the last entry are the parts of the model before and after the layers. `again` is the share of the
    micro-batches for which the forward counts twice, because it is recomputed.
    """
    at = profile.layer_arrays.seconds_at
    forward = at(Kind.F, rows)
    backward = at(Kind.I, rows) + at(Kind.W, rows) if plan.split_backward else at(Kind.B, rows)
    return forward * (1 + again) + backward


def edge_seconds(profile: ModelProfile, plan: Plan, cluster: Cluster) -> Array:
    """Return the seconds for which the message of a micro-batch occupies the slowest link between stages.

    Entry i is the time of the message if a stage begins at layer i.
    """
    rows = max(span.rows for span in plan.spans(Kind.F, 0))
    slowest = min(_select_links(plan, cluster).values(), key=lambda link: link.bandwidth, default=FREE_LINK)
    cuts = range(len(profile.layers) + 1)
    return np.array([slowest.send_seconds(profile.edge_bytes(cut) * rows) for cut in cuts])


def _limit_loads(
    profile: ModelProfile, plan: Plan, cluster: Cluster, held: Sequence[int], loads: Sequence[StageLoad]
) -> list[StageLoad]:
    """Return `loads` with an infinite load for layers that exceed the stage's share of the memory of its device."""
    known: dict[tuple[object, ...], StageLoad] = {}
    found = []
    for stage, rank in enumerate(plan.ranks):
        memory = cluster.devices[rank].memory
        if memory is None:
            found.append(loads[stage])
            continue
        share = memory / len(plan.stages[rank])
        key = id(loads[stage]), held[stage], share, plan.versions[stage]
        if key not in known:
            known[key] = _limit_bytes(loads[stage], stage_bytes(profile, plan, stage, held[stage]), share)
        found.append(known[key])
    return found


def _limit_bytes(load: StageLoad, size: Seconds, share: float) -> StageLoad:
    def within(begin: Indices, stop: Indices) -> Array:
        return np.where(size(begin, stop) <= share, load.seconds(begin, stop), np.inf)

    return StageLoad(within)


def _explain_lacking(
    profile: ModelProfile, order: Program | Policy, plan: Plan, deployment: Deployment, layers: tuple[Span, ...]
) -> str:
    """Return an error message that names the rank of a good partition that lacks the most memory, and its stages."""
    whole = replace(plan, layers=layers)
    costs = price_stages(profile, whole, deployment)
    finite = finite_orders(order)[-1]
    peak = peak_bytes(finite if isinstance(finite, Program) else simulate(order, plan, costs).program(), whole, costs)
    limits = [device.memory for device in deployment.pipeline.devices[: plan.n_ranks]]
    short = [size - (limit if limit is not None else size) for size, limit in zip(peak, limits, strict=True)]
    rank = max(range(plan.n_ranks), key=lambda r: short[r])
    weights = costs.resident_bytes(rank, plan)
    stages = ", ".join(map(str, plan.stages[rank]))
    again = "" if any(plan.recompute) else "recompute=True, "
    return (
        f"stage {stages} on rank {rank} needs {_format_gib(peak[rank])} and has {_format_gib(limits[rank] or 0)} "
        f"(activations {_format_gib(peak[rank] - weights)}, weights and optimizer {_format_gib(weights)}); "
        f"use more stages, more micro-batches, {again}or a schedule that holds fewer micro-batches"
    )


def _format_gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.1f} MiB"


def _select_links(plan: Plan, cluster: Cluster) -> dict[tuple[int, int], Link]:
    return {(a, b): cluster.link_between(a, b) for a, b, _ in plan.directed_links}
