"""Fitting layers to ranks: the partition that the simulator finds fastest, within the memory that there is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_pipes.cost import Cluster, CostModel, Device, Link, ModelProfile
from lightning_pipes.cost.profile import per_row
from lightning_pipes.ir import Kind, Plan, PlanError, Policy, Program, Schedule, Span, verify
from lightning_pipes.planning.partition import light_partitions
from lightning_pipes.sim import makespan, simulate
from lightning_pipes.sim.memory import peaks
from lightning_pipes.sim.static import compiled


@dataclass(frozen=True)
class Fit:
    """Layers on ranks, and what comes of it.

    Attributes:
        plan: with its layers.
        seconds: of a step, simulated.
        peak_bytes: of each rank.
    """

    plan: Plan
    order: Program | Policy
    costs: CostModel
    seconds: float
    peak_bytes: tuple[int, ...]

    @property
    def cuts(self) -> list[int]:
        """The layers at which stages 1, 2, ... begin, as `partition=` takes them."""
        return [span.start for span in self.plan.layers[1:]]


def fit_layers(
    profile: ModelProfile,
    schedule: Schedule | Policy,
    plan: Plan,
    cluster: Cluster | None = None,
    trials: int = 60,
) -> Fit:
    """The fastest of the partitions that come into question for `plan`, whose layers are left open.

    Stages are balanced by seconds on the devices that they sit on, messages included; a few partitions that trade
    balance for cheaper cuts are simulated, and from the fastest one cuts are moved by a layer as long as that helps, in
    at most `trials` more simulations. A device's memory limits what its stages may hold between forward and backward
    in the schedule's own order.

    Raises:
        PlanError: fewer layers than stages, or no partition fits; names the stage that lacks most.
    """
    cluster = cluster or Cluster((Device(),) * plan.n_ranks)
    n = len(profile.layers)
    if n < plan.n_stages:
        raise PlanError(f"{n} layers can't fill {plan.n_stages} stages; use fewer ranks, or fewer stages a rank")
    order, held = ordered(schedule, plan)
    loads = stage_seconds(profile, plan, cluster)
    edges = edge_seconds(profile, plan, cluster)
    fitting = _fitting(profile, plan, cluster, held)
    allowed = [np.where(fits, load, np.inf) for load, fits in zip(loads, fitting, strict=True)]
    tried: dict[tuple[Span, ...], Fit | None] = {}

    def trial(layers: tuple[Span, ...]) -> Fit | None:
        if layers not in tried:
            fit = evaluated(profile, order, replace(plan, layers=layers), cluster)
            limits = [device.memory for device in cluster.devices]
            fits = all(m is None or peak <= m for m, peak in zip(limits, fit.peak_bytes, strict=False))
            tried[layers] = fit if fits else None
        return tried[layers]

    # What a stage may take of its rank's memory is a guess where there are several on a rank: the simulator decides.
    for layers in dict.fromkeys([*light_partitions(allowed, edges), *light_partitions(loads, edges)]):
        trial(layers)
    found = [fit for fit in tried.values() if fit is not None]
    if not found:
        raise PlanError(_lacking(profile, order, plan, cluster, loads, edges))
    best = min(found, key=lambda fit: fit.seconds)
    until = len(tried) + trials
    moved = True
    while moved:
        moved = False
        for layers in _neighbours(best.plan.layers):
            if len(tried) >= until:
                return best
            fit = trial(layers)
            if fit is not None and fit.seconds < best.seconds:
                best, moved = fit, True
    return best


def _neighbours(layers: tuple[Span, ...]) -> Iterator[tuple[Span, ...]]:
    """Every cut moved by one layer, either way; no stage gets empty."""
    for s in range(len(layers) - 1):
        a, b = layers[s], layers[s + 1]
        for cut in (a.stop - 1, a.stop + 1):
            if a.start < cut < b.stop:
                yield (*layers[:s], Span(a.start, cut), Span(cut, b.stop), *layers[s + 2 :])


def ordered(schedule: Schedule | Policy, plan: Plan) -> tuple[Program | Policy, tuple[int, ...]]:
    """The order, and the most rows that every stage holds between F and B.

    A policy is asked in virtual time on equal stages, with backwards twice as long as forwards.
    """
    if isinstance(schedule, Schedule):
        program = schedule.program(plan)
        return program, verify(program, plan).peak_rows
    run = simulate(schedule, plan, CostModel.uniform(plan.n_stages, forward=1.0, backward=2.0))
    return schedule, verify(run.program(), plan).peak_rows


def evaluated(profile: ModelProfile, order: Program | Policy, plan: Plan, cluster: Cluster) -> Fit:
    """What a plan with its layers comes to."""
    speeds = [cluster.devices[rank].speed for rank in plan.ranks]
    costs = replace(profile.costs(plan.layers, speeds), links=_links(plan, cluster))
    bare = replace(plan, layers=())  # equal for all partitions, so that the order is lowered once
    if isinstance(order, Program):
        peak = peaks(compiled(order, bare), bare, costs, None)
        return Fit(plan, order, costs, makespan(order, bare, costs) / 1e9, peak)
    timeline = simulate(order, bare, costs)
    return Fit(plan, order, costs, timeline.makespan / 1e9, timeline.peak_bytes)


def stage_seconds(profile: ModelProfile, plan: Plan, cluster: Cluster) -> list[np.ndarray]:
    """For each stage the seconds of one micro-batch, F and B, of the layers i to j in row i, column j."""
    n = len(profile.layers)
    found = []
    for stage, rank in enumerate(plan.ranks):
        rows = max(span.rows for span in plan.spans(Kind.F, stage))
        again = bool(plan.recompute) and plan.recompute[stage]
        each = np.array([_both(profile, layer, rows, again) for layer in range(n)]) / cluster.devices[rank].speed
        ends = np.concatenate([[0.0], np.cumsum(each)])
        load = ends[None, :] - ends[:, None]
        load[np.tril_indices(n + 1)] = np.inf
        if stage == 0:
            load = load + _ends(profile, rows, first=True) / cluster.devices[rank].speed
        if stage == plan.n_stages - 1:
            load = load + _ends(profile, rows, first=False) / cluster.devices[rank].speed
        found.append(load)
    return found


def edge_seconds(profile: ModelProfile, plan: Plan, cluster: Cluster) -> np.ndarray:
    """Seconds that a micro-batch's message occupies the slowest link between stages, if a stage begins at layer i."""
    rows = max(span.rows for span in plan.spans(Kind.F, 0))
    slowest = min((link.bandwidth for link in _links(plan, cluster).values()), default=float("inf"))
    cuts = range(len(profile.layers) + 1)
    return np.array([profile.edge_bytes(cut) * rows / slowest for cut in cuts])


def _fitting(profile: ModelProfile, plan: Plan, cluster: Cluster, held: Sequence[int]) -> list[np.ndarray]:
    """For each stage whether the layers i to j fit its share of its device's memory."""
    n = len(profile.layers)
    found = []
    for stage, rank in enumerate(plan.ranks):
        limit = cluster.devices[rank].memory
        if limit is None:
            found.append(np.ones((n + 1, n + 1), dtype=bool))
            continue
        needed = stage_bytes(profile, plan, stage, held[stage])
        found.append(needed <= limit / len(plan.stages[rank]))
    return found


def stage_bytes(profile: ModelProfile, plan: Plan, stage: int, held: int) -> np.ndarray:
    """Bytes that a stage needs which keeps `held` rows, of the layers i to j in row i, column j."""
    n = len(profile.layers)
    versions = plan.versions[stage]
    fixed = [versions * x.weight_bytes + x.gradient_bytes + x.optimizer_bytes for x in profile.layers]
    kept = [per_row(x.saved) for x in profile.layers]
    rows = max(span.rows for span in plan.spans(Kind.F, stage))
    again = bool(plan.recompute) and plan.recompute[stage]
    inputs = np.array([profile.edge_bytes(cut) if cut else 0.0 for cut in range(n + 1)])
    fixed_ends, kept_ends = (np.concatenate([[0.0], np.cumsum(values)]) for values in (fixed, kept))
    weights = fixed_ends[None, :] - fixed_ends[:, None]
    activations = kept_ends[None, :] - kept_ends[:, None]
    if again:
        return np.asarray(weights + inputs[:, None] * held + activations * rows)
    return np.asarray(weights + activations * held)


def _lacking(
    profile: ModelProfile,
    order: Program | Policy,
    plan: Plan,
    cluster: Cluster,
    loads: Sequence[np.ndarray],
    edges: np.ndarray,
) -> str:
    """Which stage of the otherwise best partition lacks most memory."""
    layers = light_partitions(loads, edges)[0]
    fit = evaluated(profile, order, replace(plan, layers=layers), cluster)
    limits = [device.memory for device in cluster.devices[: plan.n_ranks]]
    short = [peak - (limit if limit is not None else peak) for peak, limit in zip(fit.peak_bytes, limits, strict=True)]
    rank = max(range(plan.n_ranks), key=lambda r: short[r])
    weights = fit.costs.resident(rank, fit.plan)
    stages = ", ".join(map(str, plan.stages[rank]))
    return (
        f"stage {stages} on rank {rank} needs {_gib(fit.peak_bytes[rank])} and has {_gib(limits[rank] or 0)} "
        f"(activations {_gib(fit.peak_bytes[rank] - weights)}, weights and optimizer {_gib(weights)}); "
        "use more stages, more micro-batches, recompute=True, or a schedule that holds fewer micro-batches"
    )


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.1f} MiB"


def _both(profile: ModelProfile, layer: int, rows: int, again: bool) -> float:
    forward = profile.seconds(Kind.F, layer, rows)
    return forward * (2 if again else 1) + profile.seconds(Kind.B, layer, rows)


def _ends(profile: ModelProfile, rows: int, first: bool) -> float:
    part = replace(profile, layers=(profile.before if first else profile.after,))
    return _both(part, 0, rows, False)


def _links(plan: Plan, cluster: Cluster) -> dict[tuple[int, int], Link]:
    return {(a, b): cluster.link(a, b) for a, b, _ in plan.links}
