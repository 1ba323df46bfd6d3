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
    every = [loads] * stages
    bound = _best(every, np.maximum)[0][-1, n]
    return _chosen([np.where(found <= bound * (1 + 1e-12), found, np.inf) ** 2 for found in every])


def light_partitions(
    loads: Sequence[np.ndarray], edges: np.ndarray, slacks: Sequence[float] = (1.0, 1.02, 1.05, 1.1, 1.2, 1.4)
) -> list[tuple[Span, ...]]:
    """Partitions whose heaviest stage is as light as can be, or lighter than that times a slack, each with the cheapest
    cuts that this allows; without repetitions, the lightest first. Empty if there is none at all.

    Args:
        loads: of each stage, the seconds of the layers i to j (exclusive) in row i, column j; infinite where the stage
            may not have them.
        edges: seconds that a message takes if a stage begins at layer i.
    """
    n = loads[0].shape[0] - 1
    whole = [_with_edges(found, edges, n) for found in loads]
    bound = _best(whole, np.maximum)[0][-1, n]
    if not np.isfinite(bound):
        return []
    found: dict[tuple[Span, ...], None] = {}
    for slack in slacks:
        allowed = [np.where(each <= bound * slack * (1 + 1e-12), each, np.inf) for each in whole]
        # The sum of edges decides, and where that is equal the evenness of the stages.
        scale = max(float(edges[np.isfinite(edges)].max(initial=0.0)), bound)
        cost = [
            np.where(np.isfinite(each), edges[:, None] / scale + 1e-3 * (each / bound) ** 2, np.inf) for each in allowed
        ]
        found[_chosen(cost)] = None
    return list(found)


def _with_edges(loads: np.ndarray, edges: np.ndarray, n: int) -> np.ndarray:
    """A stage is as heavy as its layers, or as a message at either end if that takes longer."""
    out = edges.copy()
    out[n] = 0.0
    into = edges.copy()
    into[0] = 0.0
    whole: np.ndarray = np.maximum(loads, np.maximum(into[:, None], out[None, :]))
    return whole


def _chosen(costs: Sequence[np.ndarray]) -> tuple[Span, ...]:
    """The partition with the smallest sum."""
    _, choice = _best(costs, np.add)
    cuts = [costs[0].shape[0] - 1]
    for stage in reversed(range(len(costs))):
        cuts.append(int(choice[stage, cuts[-1]]))
    cuts.reverse()
    return tuple(Span(a, b) for a, b in itertools.pairwise(cuts))


def _best(costs: Sequence[np.ndarray], join: np.ufunc) -> tuple[np.ndarray, np.ndarray]:
    """For each number of stages and of layers: the smallest joined cost, and where its last stage begins."""
    n = costs[0].shape[0]
    value = np.full((len(costs), n), np.inf)
    choice = np.zeros((len(costs), n), dtype=int)
    value[0] = costs[0][0]
    for stage in range(1, len(costs)):
        joined = join(value[stage - 1][:, None], costs[stage])
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
