"""Which layers make a stage."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from lightning_pipes.ir import Plan, PlanError, Span


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
    loads = between(np.asarray(weights, dtype=float))
    bound = lightest([loads] * stages)
    (cost,) = _bands([np.where(loads <= bound * (1 + 1e-12), loads, np.inf) ** 2])
    return _chosen([cost] * stages)


def with_layer(plan: Plan, layer: int, rank: int) -> Plan:
    """The plan with one layer in another stage: that of `rank` which is next to its own.

    Raises:
        PlanError: there is no such stage, because the layer is not the first or last of its own.
    """
    for stage, span in enumerate(plan.layers):
        for other, at_end in ((stage - 1, layer == span.start), (stage + 1, layer == span.stop - 1)):
            if span.start <= layer < span.stop and at_end and plan.ranks[other : other + 1] == (rank,):
                layers = list(plan.layers)
                down = other < stage
                layers[stage] = Span(layer + 1, span.stop) if down else Span(span.start, layer)
                layers[other] = Span(layers[other].start, layer + 1) if down else Span(layer, layers[other].stop)
                return replace(plan, layers=tuple(layers))
    raise PlanError(
        f"layer {layer} can't go to rank {rank}: stages have layers {plan.layers} on ranks {plan.ranks}, and only the "
        "first or last layer of one can go to its neighbour"
    )


def between(values: np.ndarray) -> np.ndarray:
    """The sum of the values i to j (exclusive) in row i, column j."""
    ends = np.concatenate([[0.0], np.cumsum(values)])
    return np.asarray(ends[None, :] - ends[:, None])


def lightest(loads: Sequence[np.ndarray]) -> float:
    """How heavy the heaviest stage is at least; infinite if there is no partition. `loads` as in `light_partitions`."""
    return float(_best(_bands(loads), np.maximum)[0][-1])


def light_partitions(
    loads: Sequence[np.ndarray], edges: np.ndarray, slacks: Sequence[float] = (1.0, 1.02, 1.05, 1.1, 1.2, 1.4)
) -> list[tuple[Span, ...]]:
    """Partitions whose heaviest stage is as light as can be, or lighter than that times a slack, each with the cheapest
    cuts that this allows; without repetitions, the lightest first. Empty if there is none at all. Of equally good ones
    there are two: with heavy stages late, and early, which balance does not tell apart and a schedule does.

    Args:
        loads: of each stage, the seconds of the layers i to j (exclusive) in row i, column j; infinite where the stage
            may not have them.
        edges: seconds that a message takes if a stage begins at layer i.
    """
    whole = _each(loads, lambda found: _with_edges(found, edges))
    bound = lightest(whole)
    if not np.isfinite(bound):
        return []
    most = bound * max(slacks) * (1 + 1e-12)
    scale = max(float(edges[np.isfinite(edges)].max(initial=0.0)), bound)
    # The sum of edges decides, and where that is equal the evenness of the stages.
    bands = _bands(_each(whole, lambda found: np.where(found <= most, found, np.inf)))
    into = _bands([np.repeat(edges[:, None] / scale, len(edges), axis=1)], bands[0].shape[1])[0]
    found: dict[tuple[Span, ...], None] = {}
    for slack in slacks:
        limit = bound * slack * (1 + 1e-12)

        def cost(band: np.ndarray, limit: float = limit) -> np.ndarray:
            return np.where(band <= limit, into + 1e-3 * (band / bound) ** 2, np.inf)

        costs = _each(bands, cost)
        for late in (False, True):
            found[_chosen(costs, late)] = None
    return list(found)


def _each(arrays: Sequence[np.ndarray], change: Callable[[np.ndarray], np.ndarray]) -> list[np.ndarray]:
    """Every array changed; what is the same for many stages is changed once."""
    known: dict[int, np.ndarray] = {}
    for array in arrays:
        if id(array) not in known:
            known[id(array)] = change(array)
    return [known[id(array)] for array in arrays]


def _with_edges(loads: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """A stage is as heavy as its layers, or as a message at either end if that takes longer."""
    out = edges.copy()
    out[-1] = 0.0
    into = edges.copy()
    into[0] = 0.0
    whole: np.ndarray = np.maximum(loads, np.maximum(into[:, None], out[None, :]))
    return whole


def _bands(loads: Sequence[np.ndarray], width: int = 0) -> list[np.ndarray]:
    """Of each stage, the layers j - width + k to j in row j, column k: as many as a stage may have, and one at least.

    Where stages are many each has few layers, and this is far less than every i and j.
    """
    n = loads[0].shape[0] - 1
    if not width:
        finite = np.logical_or.reduce([np.isfinite(found) for found in {id(found): found for found in loads}.values()])
        starts, stops = np.nonzero(np.triu(finite, 1))
        width = int((stops - starts).max(initial=1))
    begin = _begins(n, width)
    column = np.arange(n + 1)[:, None]
    return _each(loads, lambda found: np.where(begin >= 0, found[np.maximum(begin, 0), column], np.inf))


def _begins(n: int, width: int) -> np.ndarray:
    return np.arange(n + 1)[:, None] - width + np.arange(width)[None, :]


def _chosen(bands: Sequence[np.ndarray], late: bool = False) -> tuple[Span, ...]:
    """The partition with the smallest sum; of equal ones that whose last stages begin early, or late."""
    _, choice = _best(bands, np.add, late)
    cuts = [bands[0].shape[0] - 1]
    for begins in reversed(choice):
        cuts.append(int(begins[cuts[-1]]))
    cuts.reverse()
    return tuple(Span(a, b) for a, b in itertools.pairwise(cuts))


def _best(bands: Sequence[np.ndarray], join: np.ufunc, late: bool = False) -> tuple[np.ndarray, list[np.ndarray]]:
    """For each number of layers the smallest joined cost of all stages, and for each stage where it begins then."""
    n = bands[0].shape[0] - 1
    begin = _begins(n, bands[0].shape[1])
    before = np.maximum(begin, 0)
    row = np.arange(n + 1)
    value = np.full(n + 1, np.inf)
    value[0] = 0.0
    choice = []
    for band in bands:
        joined = join(value[before], band)
        best = joined.argmin(axis=1)
        if late:  # sums of equal parts differ in their last digits
            close = joined <= joined[row, best, None] * (1 + 1e-12)
            best = joined.shape[1] - 1 - close[:, ::-1].argmax(axis=1)
        choice.append(begin[row, best])
        value = joined[row, best]
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
