"""Choice of the layers of each stage by recent measurements of the devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_pipes.cost import Deployment
from lightning_pipes.ir import Kind, Plan, Program, Span
from lightning_pipes.planning.memory import held_rows, stage_bytes
from lightning_pipes.planning.replanning import Durations, replay_of
from lightning_pipes.strategies.dynpipe.partitions import (
    Cuts,
    affordable_blocks,
    all_partitions,
    condense_layers,
    cuts_of,
    keeps_tied_layers,
    layer_weights,
    list_neighbours,
    spans_of,
)
from lightning_pipes.strategies.dynpipe.slowdown import SlowdownModel

Array = npt.NDArray[np.float64]
MAX_SIMULATED_PARTITIONS = 64
"""The number of partitions with the lowest bounds that are simulated with mean durations."""
MAX_REPLAYED_PARTITIONS = 12
"""The number of these partitions that are simulated with the duration of every single operation."""


@dataclass(frozen=True)
class PartitionChange:
    """A change from the current partition to another one.

    Attributes:
        layers: the layers of each stage after the change.
        old, new: the seconds of a step in each window, with the current partition and with the other one.
    """

    layers: tuple[Span, ...]
    old: tuple[float, ...]
    new: tuple[float, ...]


@dataclass(frozen=True)
class Search:
    """Limits of the search for other partitions.

    Attributes:
        top_k: the number of blocks of the condensed model. None means as many as the search can evaluate; see
            `affordable_blocks`.
        incremental: whether blocks move only to a neighboring stage.
    """

    top_k: int | None = None
    incremental: bool = False


FULL_SEARCH = Search()


class WindowReplay:
    """Replay of measured windows with other partitions of the layers.

    Args:
        models: one for each window, the oldest first.
        order: the program of the plan. For a schedule that does not flush, this is the endless program.
    """

    def __init__(self, models: Sequence[SlowdownModel], order: Program) -> None:
        self._models, self.order = models, order
        self.now = models[-1]
        self._overhead = self.now.seen.costs.overhead
        self.old = self._each(self.now.now)

    def predict_change(self, layers: Sequence[Span]) -> PartitionChange:
        """Return the change to the partition with these layers on the stages."""
        cuts = np.array([[0, *(span.stop for span in layers)]], np.int64)
        return PartitionChange(tuple(layers), self.old, self._each(cuts))

    def mean_step(self, cuts: Cuts) -> Array:
        """Return the seconds of a step with each partition, averaged over all windows."""
        each = [self._seconds(s.seen.batches, s.stage_durations(cuts)) for s in self._models]
        return np.asarray(np.mean(each, axis=0))

    def mean_durations(self, cuts: Cuts) -> Durations:
        """Return the durations of one batch (see `SlowdownModel.mean_durations`), averaged over all windows."""
        each = [model.mean_durations(cuts) for model in self._models]
        return {key: np.mean([means[key] for means in each], axis=0) for key in each[0]}

    def estimate_steps(self, means: Durations) -> Array:
        """Return the seconds of a step with the given durations of one batch (see `SlowdownModel.mean_durations`)."""
        batches = self.now.plan.n_stages + 2 if self.order.is_endless else 1
        return self._seconds(batches, means)

    def _each(self, cuts: Cuts) -> tuple[float, ...]:
        """Return the seconds of a step with one partition in each window.

        Windows with the same number of batches are simulated together.
        """
        found: dict[int, float] = {}
        for batches in {each.seen.batches for each in self._models}:
            same = [n for n, each in enumerate(self._models) if each.seen.batches == batches]
            tables = [self._models[n].stage_durations(cuts) for n in same]
            together = {key: np.concatenate([each[key] for each in tables]) for key in tables[0]}
            found |= dict(zip(same, self._seconds(batches, together).tolist(), strict=True))
        return tuple(found[n] for n in range(len(found)))

    def _seconds(self, batches: int, durations: Durations) -> Array:
        replay = replay_of(self.order, self.now.plan, batches)
        return np.asarray(replay.step_seconds(durations, self._overhead).mean(axis=1))


def find_partition(windows: WindowReplay, cuts: Cuts, least: float = 0.0) -> PartitionChange | None:
    """Return the partition with the shortest mean step in these windows (DynPipe, S V-B1, Algorithm 2, Repartition).

    The function computes a price for all partitions. The partitions with the lowest bounds are simulated with mean
    durations, and the best of these with the duration of every single operation.

    Args:
        windows: the replay of the measured windows.
        cuts: the partitions among which to choose, as returned by `partitions_of`.
        least: the share of a step that has to be saved.

    Returns:
        The best partition, or None if there are no partitions or if no bound is low enough to save `least`.
    """
    if not len(cuts):
        return None
    means = windows.mean_durations(cuts)
    bounds = step_bounds(means, windows.now.plan, windows.order.is_endless)
    first = np.argsort(bounds, kind="stable")[:MAX_SIMULATED_PARTITIONS]
    if bounds[first[0]] > (1 - least) * np.mean(windows.old):
        return None
    seconds = windows.estimate_steps({key: table[first] if len(table) > 1 else table for key, table in means.items()})
    chosen = cuts[first[np.argsort(seconds, kind="stable")[:MAX_REPLAYED_PARTITIONS]]]
    return windows.predict_change(spans_of(chosen[int(windows.mean_step(chosen).argmin())]))


def partitions_of(
    windows: WindowReplay,
    deployment: Deployment | None = None,
    tied: Sequence[Sequence[int]] = (),
    search: Search = FULL_SEARCH,
    reserve: float = 0.0,
) -> Cuts:
    """Return the partitions between blocks of the condensed model that fit into memory, without the current partition.

    Args:
        windows: the replay of the measured windows.
        deployment: the devices and links, or None if they are unknown.
        tied: the numbers of layers that share a parameter.
        search: the limits of the search.
        reserve: the number of bytes that have to stay free on devices that receive layers.
    """
    now = windows.now
    every = _partitions(now, deployment, search)
    every = every[keeps_tied_layers(every, now.plan.layers, tied)]
    every = every[_fitting(every, now, windows.order, deployment, reserve)]
    others: Cuts = every[(every != now.now).any(axis=1)]
    return others


def partitions_that_free(
    windows: WindowReplay,
    short: Mapping[int, float],
    reserve: float,
    deployment: Deployment | None = None,
    tied: Sequence[Sequence[int]] = (),
    search: Search = FULL_SEARCH,
) -> Cuts:
    """Return the partitions that free memory on devices that are short of it (DynPipe, S V-B2).

    These are the partitions that free all of the missing bytes. If there are none, they are the partitions that free
    the largest share of them. The result is empty if no partition frees memory.

    Args:
        windows: the replay of the measured windows.
        short: the number of missing bytes by rank.
        reserve: the number of bytes that have to stay free on devices that receive layers.
        deployment: the devices and links, or None if they are unknown.
        tied: the numbers of layers that share a parameter.
        search: the limits of the search.
    """
    cuts = partitions_of(windows, deployment, tied, search, reserve)
    needed = _bytes_by_rank(np.vstack([windows.now.now, cuts]), windows.now, windows.order)
    freed = needed[0] - needed[1:]
    shares = np.min([freed[:, rank] / lacks for rank, lacks in short.items()], axis=0).clip(max=1.0)
    best = shares.max(initial=0.0)
    return cuts[shares >= best] if best > 0 else cuts[:0]


def step_bounds(means: Durations, plan: Plan, endless: bool) -> Array:
    """Return a lower bound for the seconds of a step of each partition.

    A rank runs the work of all its stages one after another. If each rank has one stage, the bound is higher. In a
    schedule that flushes, a micro-batch also passes through the stages and links before a stage, forward and back. In a
    schedule that does not flush, at most S - s + 1 micro-batches are in flight on stages s to S, and each of them takes
    the way there and back. The bound is the maximum over s of the sum of p_i and c_i for i >= s, divided by S - s + 1.
    E5 of the paper replaces this by half of the sum over all stages but the last, for any number of stages.

    Args:
        means: the durations of one batch; see `SlowdownModel.mean_durations`.
        plan: the plan that specifies ranks and micro-batches.
        endless: whether the schedule does not flush.
    """
    work = _by_stage(means, plan, (Kind.F, Kind.R, Kind.B, Kind.I, Kind.W))
    by_rank = np.zeros((len(work), plan.n_ranks))
    for stage, rank in enumerate(plan.ranks):
        by_rank[:, rank] += work[:, stage]
    if plan.n_stages != plan.n_ranks:
        return np.asarray(by_rank.max(axis=1))
    one = {key: table.min(axis=2, keepdims=True) for key, table in means.items() if key[0] is not Kind.STEP}
    way = _by_stage(one, plan, (Kind.F,)) + _by_stage(one, plan, (Kind.SF,))
    if not plan.split_backward:  # otherwise W fills the way back
        way += _by_stage(one, plan, (Kind.B,)) + np.roll(_by_stage(one, plan, (Kind.SB,)), -1, axis=1)
    if not endless:
        return np.asarray((by_rank + np.cumsum(way, axis=1) - way).max(axis=1))
    m, in_flight = len(plan.spans(Kind.F, 0)), np.arange(plan.n_stages, 0, -1)
    after = np.cumsum(way[:, ::-1], axis=1)[:, ::-1]
    return np.asarray(np.maximum(by_rank.max(axis=1), m * (after / in_flight).max(axis=1)))


def _by_stage(means: Durations, plan: Plan, kinds: Sequence[Kind]) -> Array:
    """Return the total seconds of all operations of these kinds, by partition and stage."""
    cases = max(len(table) for table in means.values())
    found = np.zeros((cases, plan.n_stages))
    for (kind, stage), table in means.items():
        if kind in kinds:
            found[:, stage] += table.sum(axis=(1, 2))
    return found


def _partitions(now: SlowdownModel, deployment: Deployment | None, search: Search) -> Cuts:
    plan, profile = now.plan, now.profile
    n, at = len(profile.layers), cuts_of(plan.layers)
    k = search.top_k or affordable_blocks(plan.n_stages, n)
    rows = max(span.rows for span in plan.spans(Kind.F, 0))
    columns = profile.layer_arrays
    seconds = sum((columns.seconds_at(kind, rows)[1:-1] for kind in now.plan.compute_kinds), np.zeros(n))
    output = np.array([profile.edge_bytes(layer + 1) * rows for layer in range(n)])
    may = condense_layers(layer_weights(seconds, output, _slowest(plan, deployment)), max(k, plan.n_stages))
    near = list_neighbours(at, may, n)
    if search.incremental:
        return near
    return np.unique(np.vstack([near, all_partitions(may, plan.n_stages, n)]), axis=0)


def _slowest(plan: Plan, deployment: Deployment | None) -> float:
    pairs = [(a, b) for a, b, _ in plan.directed_links]
    if deployment is None or not pairs:
        return float("inf")
    return min(deployment.pipeline.link_between(a, b).bandwidth for a, b in pairs)


def _fitting(
    cuts: Cuts, now: SlowdownModel, order: Program, deployment: Deployment | None, reserve: float
) -> npt.NDArray[np.bool_]:
    """Return for each partition whether it fits into memory.

    On each device, a partition has to fit into the memory of the device, or need no more than the current partition.
    The memory that it needs in addition to the current partition has to fit into the free memory.
    """
    plan = now.plan
    devices = () if deployment is None else deployment.pipeline.devices
    limits = [devices[rank].memory if devices else None for rank in range(plan.n_ranks)]
    free = now.seen.free or (None,) * plan.n_ranks
    keep = np.ones(len(cuts), bool)
    if all(limit is None for limit in (*limits, *free)):
        return keep
    needed = _bytes_by_rank(np.vstack([now.now, cuts]), now, order)
    for rank, (limit, left) in enumerate(zip(limits, free, strict=True)):
        if limit is not None:
            keep &= (needed[1:, rank] <= limit) | (needed[1:, rank] <= needed[0, rank])
        if left is not None:
            more = needed[1:, rank] - needed[0, rank]
            keep &= more <= np.where(more > 0, left - reserve, left)
    return keep


def _bytes_by_rank(cuts: Cuts, now: SlowdownModel, order: Program) -> Array:
    """Return the bytes that each device needs. Axis 0 is partitions, and axis 1 is ranks."""
    plan = now.plan
    held = held_rows(order.unroll(2 * plan.n_stages) if order.is_endless else order, plan)
    needed = np.zeros((len(cuts), plan.n_ranks))
    for stage, rank in enumerate(plan.ranks):
        sizes = stage_bytes(now.profile, plan, stage, held[stage])
        needed[:, rank] += sizes(cuts[:, stage], cuts[:, stage + 1])
    return needed
