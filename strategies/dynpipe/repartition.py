"""Choose the layers of each stage from recent measurements of the devices."""

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
from lightning_pipes.strategies.dynpipe.situation import Situation

Array = npt.NDArray[np.float64]
SIMULATED = 64
"""Partitions that are simulated with mean durations, those with the lowest bounds."""
REPLAYED = 12
"""Of these, how many are simulated with every operation's own."""


@dataclass(frozen=True)
class PartitionChange:
    """Another partition than the one that runs.

    Attributes:
        layers: of each stage.
        old, new: seconds of a step with the partition that runs, and with this one, of every window.
    """

    layers: tuple[Span, ...]
    old: tuple[float, ...]
    new: tuple[float, ...]


@dataclass(frozen=True)
class Search:
    """Limits of the search for other partitions.

    Attributes:
        top_k: blocks of the condensed model; None for as many as can be gone through, see `affordable_blocks`.
        incremental: blocks move to a neighbouring stage only.
    """

    top_k: int | None = None
    incremental: bool = False


WHOLE = Search()


class WindowReplay:
    """Replays measured windows of one plan with layers placed otherwise.

    Args:
        situations: one of each window, the oldest first.
        order: of the plan; of a schedule that does not flush the endless one.
    """

    def __init__(self, situations: Sequence[Situation], order: Program) -> None:
        self._situations, self.order = situations, order
        self.now = situations[-1]
        self._overhead = self.now.seen.costs.overhead
        self.old = self._each(self.now.now)

    def predict_change(self, layers: Sequence[Span]) -> PartitionChange:
        """Return the change that these layers on the stages would be."""
        cuts = np.array([[0, *(span.stop for span in layers)]], np.int64)
        return PartitionChange(tuple(layers), self.old, self._each(cuts))

    def mean_step(self, cuts: Cuts) -> Array:
        """Return seconds of a step of each partition, the mean of all windows."""
        each = [self._seconds(s.seen.batches, s.stage_durations(cuts)) for s in self._situations]
        return np.asarray(np.mean(each, axis=0))

    def mean_durations(self, cuts: Cuts) -> Durations:
        """Durations of a batch, as of `Situation.mean_durations`, the mean of all windows."""
        each = [situation.mean_durations(cuts) for situation in self._situations]
        return {key: np.mean([means[key] for means in each], axis=0) for key in each[0]}

    def estimate_steps(self, means: Durations) -> Array:
        """Seconds of a step with the durations of a batch, as of `Situation.mean_durations`."""
        batches = self.now.plan.n_stages + 2 if self.order.is_endless else 1
        return self._seconds(batches, means)

    def _each(self, cuts: Cuts) -> tuple[float, ...]:
        """Return seconds of a step of one partition in every window; windows of as many batches are timed together."""
        found: dict[int, float] = {}
        for batches in {each.seen.batches for each in self._situations}:
            same = [n for n, each in enumerate(self._situations) if each.seen.batches == batches]
            tables = [self._situations[n].stage_durations(cuts) for n in same]
            together = {key: np.concatenate([each[key] for each in tables]) for key in tables[0]}
            found |= dict(zip(same, self._seconds(batches, together).tolist(), strict=True))
        return tuple(found[n] for n in range(len(found)))

    def _seconds(self, batches: int, durations: Durations) -> Array:
        replay = replay_of(self.order, self.now.plan, batches)
        return np.asarray(replay.step_seconds(durations, self._overhead).mean(axis=1))


def find_partition(windows: WindowReplay, cuts: Cuts, least: float = 0.0) -> PartitionChange | None:
    """Return the partition with the shortest steps in these windows, on the average (DynPipe, S V-B1, Algorithm 2,
    Repartition); None where there is none, or none can save more than the share `least` of a step.

    All of them are priced; those with the lowest bounds are simulated with mean durations, and the best of these with
    every operation's own.

    Args:
        cuts: those that come into question, as of `partitions_of`.
    """
    if not len(cuts):
        return None
    means = windows.mean_durations(cuts)
    bounds = step_bounds(means, windows.now.plan, windows.order.is_endless)
    first = np.argsort(bounds, kind="stable")[:SIMULATED]
    if bounds[first[0]] > (1 - least) * np.mean(windows.old):
        return None
    seconds = windows.estimate_steps({key: table[first] if len(table) > 1 else table for key, table in means.items()})
    chosen = cuts[first[np.argsort(seconds, kind="stable")[:REPLAYED]]]
    return windows.predict_change(spans_of(chosen[int(windows.mean_step(chosen).argmin())]))


def partitions_of(
    windows: WindowReplay,
    deployment: Deployment | None = None,
    tied: Sequence[Sequence[int]] = (),
    search: Search = WHOLE,
    reserve: float = 0.0,
) -> Cuts:
    """Return the partitions at blocks of the condensed model that fit into memory, without the current one.

    Args:
        tied: numbers of layers that share a parameter.
        reserve: bytes that stay free on devices that get layers.
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
    search: Search = WHOLE,
) -> Cuts:
    """Return the partitions that free memory on devices which lack it: those that free all they lack, or if there are
    none, those that free the largest share of it; empty where none frees any (DynPipe, S V-B2).

    Args:
        short: bytes that devices lack, by rank.
        reserve: bytes that stay free on devices that get layers.
    """
    cuts = partitions_of(windows, deployment, tied, search, reserve)
    needed = _bytes_by_rank(np.vstack([windows.now.now, cuts]), windows.now, windows.order)
    freed = needed[0] - needed[1:]
    shares = np.min([freed[:, rank] / lacks for rank, lacks in short.items()], axis=0).clip(max=1.0)
    best = shares.max(initial=0.0)
    return cuts[shares >= best] if best > 0 else cuts[:0]


def step_bounds(means: Durations, plan: Plan, endless: bool) -> Array:
    """Return the least seconds of a step of each partition, with the durations of `Situation.mean_durations`.

    A rank works through all its stages. With one stage a rank, what flushes passes the stages and links before a stage
    forward and back besides; what does not has S - s + 1 micro-batches on stages s to S at most, and each of them takes
    the way there and back: max over s of the sums of p_i and c_i from s on over S - s + 1 (which E5 of the paper
    replaces by half of all stages but the last, for any number of stages).
    """
    work = _by_stage(means, plan, (Kind.F, Kind.B, Kind.I, Kind.W))
    by_rank = np.zeros((len(work), plan.n_ranks))
    for stage, rank in enumerate(plan.ranks):
        by_rank[:, rank] += work[:, stage]
    if plan.n_stages != plan.n_ranks:
        return np.asarray(by_rank.max(axis=1))
    one = {key: table.min(axis=2, keepdims=True) for key, table in means.items() if key[0] is not Kind.STEP}
    way = _by_stage(one, plan, (Kind.F,)) + _by_stage(one, plan, (Kind.SF,))
    if not plan.split_backward:  # else W fills the way back
        way += _by_stage(one, plan, (Kind.B,)) + np.roll(_by_stage(one, plan, (Kind.SB,)), -1, axis=1)
    if not endless:
        return np.asarray((by_rank + np.cumsum(way, axis=1) - way).max(axis=1))
    m, in_flight = len(plan.spans(Kind.F, 0)), np.arange(plan.n_stages, 0, -1)
    after = np.cumsum(way[:, ::-1], axis=1)[:, ::-1]
    return np.asarray(np.maximum(by_rank.max(axis=1), m * (after / in_flight).max(axis=1)))


def _by_stage(means: Durations, plan: Plan, kinds: Sequence[Kind]) -> Array:
    """Return seconds of all operations of these kinds together, by partition and stage."""
    cases = max(len(table) for table in means.values())
    found = np.zeros((cases, plan.n_stages))
    for (kind, stage), table in means.items():
        if kind in kinds:
            found[:, stage] += table.sum(axis=(1, 2))
    return found


def _partitions(now: Situation, deployment: Deployment | None, search: Search) -> Cuts:
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
    cuts: Cuts, now: Situation, order: Program, deployment: Deployment | None, reserve: float
) -> npt.NDArray[np.bool_]:
    """Return which partitions fit: into the devices' memory, and with what they need more than now into what is
    free."""
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


def _bytes_by_rank(cuts: Cuts, now: Situation, order: Program) -> Array:
    """Return the bytes that every device needs: axis 0 is partitions, axis 1 ranks."""
    plan = now.plan
    held = held_rows(order.unroll(2 * plan.n_stages) if order.is_endless else order, plan)
    needed = np.zeros((len(cuts), plan.n_ranks))
    for stage, rank in enumerate(plan.ranks):
        sizes = stage_bytes(now.profile, plan, stage, held[stage])
        needed[:, rank] += sizes(cuts[:, stage], cuts[:, stage + 1])
    return needed
