"""Which layers make a stage."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from lightning_pipes.ir import PlanError, Span


def even_partition(weights: Sequence[float], stages: int) -> tuple[Span, ...]:
    """Consecutive layers for each stage, none empty, so that the heaviest stage is as light as can be.

    Among those, the one whose stages differ least: with the smallest sum of squares. `weights` has one entry a layer,
    in any unit: parameters, seconds, bytes.

    Raises:
        PlanError: fewer layers than stages, no stage, or a negative weight.
    """
    n = len(weights)
    if stages < 1:
        raise PlanError(f"a partition needs at least one stage, got {stages}")
    if n < stages:
        raise PlanError(
            f"{n} layers can't fill {stages} stages; use fewer ranks, fewer stages a rank, or more layers "
            "(cut points in `partition` may leave a stage empty)"
        )
    if min(weights) < 0:
        raise PlanError(f"weights of layers must not be negative, got {min(weights)}")
    ends = np.concatenate([[0.0], np.cumsum(np.asarray(weights, dtype=float))])
    loads = ends[None, :] - ends[:, None]  # loads[i, j]: of the layers i to j, j exclusive
    loads[np.tril_indices(n + 1)] = np.inf  # no stage is empty
    bound = _best(loads, stages, np.maximum)[0][-1, n]
    allowed = np.where(loads <= bound * (1 + 1e-12), loads, np.inf)
    _, choice = _best(allowed**2, stages, np.add)
    cuts = [n]
    for stage in reversed(range(stages)):
        cuts.append(int(choice[stage, cuts[-1]]))
    cuts.reverse()
    return tuple(Span(a, b) for a, b in itertools.pairwise(cuts))


def _best(costs: np.ndarray, stages: int, join: np.ufunc) -> tuple[np.ndarray, np.ndarray]:
    """For each number of stages and of layers: the smallest joined cost, and where its last stage begins."""
    n = costs.shape[0]
    value = np.full((stages, n), np.inf)
    choice = np.zeros((stages, n), dtype=int)
    value[0] = costs[0]
    for stage in range(1, stages):
        joined = join(value[stage - 1][:, None], costs)
        choice[stage] = joined.argmin(axis=0)
        value[stage] = joined.min(axis=0)
    return value, choice


def partition_at(cuts: Sequence[int], layers: int, stages: int) -> tuple[Span, ...]:
    """The layers of each stage, where `cuts` names the layers at which stages 1, 2, ... begin.

    A cut that repeats, or that stands at an end, leaves a stage empty.

    Raises:
        PlanError: not one cut fewer than stages, or cuts that are out of order or outside the model.
    """
    if len(cuts) != stages - 1:
        raise PlanError(f"{stages} stages need {stages - 1} cut points, got {len(cuts)}: {list(cuts)}")
    edges = [0, *(int(c) for c in cuts), layers]
    if any(a > b for a, b in itertools.pairwise(edges)) or edges[0] < 0:
        raise PlanError(f"cut points must ascend from 0 to {layers}, the number of layers; got {list(cuts)}")
    return tuple(Span(a, b) for a, b in itertools.pairwise(edges))
