"""Which layers make a stage."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lightning_pipes.ir import Plan, PlanError, Span

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]
Seconds = Callable[[Indices, Indices], Array]
"""Seconds, or bytes, of the layers i to j (exclusive), for arrays of i and of j."""


def even_partition(weights: Sequence[float], stages: int, degrees: Sequence[int] = ()) -> tuple[Span, ...]:
    """Consecutive layers for each stage, none empty, so that the heaviest stage is as light as can be.

    Among those, the one whose stages differ least: with the smallest sum of squares. `weights` has one entry a layer,
    in any unit: parameters, seconds, bytes.

    Args:
        degrees: ranks of each stage, by which its weight is divided; by default they have as many.

    Raises:
        PlanError: fewer layers than stages, no stage, or a negative weight.
    """
    n = len(weights)
    if stages < 1:
        raise PlanError(f"a partition needs at least one stage, got {stages}")
    if n < stages:
        raise PlanError(
            f"{n} layers can't fill {stages} stages; use fewer processes (devices x nodes), fewer stages on each, or "
            "more layers (a partition of your own may leave a stage empty)"
        )
    if min(weights) < 0:
        raise PlanError(f"weights of layers must not be negative, got {min(weights)}")
    sums = range_sums(np.asarray(weights, dtype=float))
    of_degree = {d: StageLoad(lambda begin, stop, d=d: sums(begin, stop) / d) for d in degrees}  # type: ignore[misc]
    loads = [of_degree[d] for d in degrees] or [StageLoad(sums)] * stages
    most = min_max_load(loads, n) * (1 + 1e-12)
    bands = _Bands.within_load(loads, n, most)
    return _chosen(bands, lambda band, begin: np.where(band <= most, band, np.inf) ** 2)


def with_layer(plan: Plan, layer: int, rank: int) -> Plan:
    """Return the plan with one layer in another stage: that of `rank` which is next to its own.

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


def range_sums(values: Array) -> Seconds:
    """Return the sums of the values i to j (exclusive)."""
    ends = np.concatenate([[0.0], np.cumsum(values)])
    return lambda begin, stop: np.asarray(ends[stop] - ends[begin])


Cost = Callable[[Array, Indices], Array]
"""Of a stage that takes so many seconds and begins at such a layer."""


@dataclass(frozen=True, eq=False)
class StageLoad:
    """The seconds that a stage takes, by its layers. Stages with the same object are priced together.

    Attributes:
        seconds: infinite where the stage may not have the layers.
        least: no more than `seconds`, and never less with another layer; by default `seconds`, which then has to be
            such.
    """

    seconds: Seconds
    least: Seconds | None = None

    def count_most_layers(self, layers: int, most: float) -> int:
        """Return the most of so many layers that take no longer than `most` and are allowed, 1 at least."""
        low, high = 1, layers
        while low < high:
            count = (low + high + 1) // 2
            begin = np.arange(layers - count + 1)
            seconds = float((self.least or self.seconds)(begin, begin + count).min())
            if seconds <= most and np.isfinite(seconds):
                low = count
            else:
                high = count - 1
        return low


def min_max_load(loads: Sequence[StageLoad], layers: int) -> float:
    """Return how heavy the heaviest stage is at least, for so many layers; infinite if there is no partition.

    Where stages are many each has few layers, and to price those is far less than every i and j: what is found with few
    bounds how many a stage may have.
    """
    few = _Bands(loads, layers, dict.fromkeys(map(id, loads), min(layers, 2 * -(-layers // len(loads)) + 1)))
    bound = float(_best(few, np.maximum)[0][-1])
    enough = _Bands.within_load(loads, layers, bound)
    return bound if enough.are_in(few) else float(_best(enough, np.maximum)[0][-1])


def balanced_partitions(
    loads: Sequence[StageLoad], edges: Array, slacks: Sequence[float] = (1.0, 1.02, 1.05, 1.1, 1.2, 1.4)
) -> list[tuple[Span, ...]]:
    """Return partitions with the least maximum load, or less than a slack times it, each with the cheapest cuts.

    Partitions do not repeat, and the lightest comes first; the list is empty if there is none. Of equally good ones
    there are two, with heavy stages late and early, for schedules may differ where the balance does not.

    Args:
        loads: of each stage.
        edges: seconds that a message takes if a stage begins at layer i.
    """
    n = len(edges) - 1
    whole = _each(loads, lambda load: _with_edges(load, edges))
    bound = min_max_load(whole, n)
    if not np.isfinite(bound):
        return []
    bands = _Bands.within_load(whole, n, bound * max(slacks) * (1 + 1e-12))
    scale = max(float(edges[np.isfinite(edges)].max(initial=0.0)), bound)
    # The sum of edges decides, and where that is equal the evenness of the stages.
    into = edges / scale
    found: dict[tuple[Span, ...], None] = {}
    for slack in slacks:
        limit = bound * slack * (1 + 1e-12)

        def cost(band: Array, begin: Indices, limit: float = limit) -> Array:
            return np.where(band <= limit, into[begin] + 1e-3 * (band / bound) ** 2, np.inf)

        for late in (False, True):
            found[_chosen(bands, cost, late)] = None
    return list(found)


def _each(loads: Sequence[StageLoad], change: Callable[[StageLoad], StageLoad]) -> list[StageLoad]:
    """Return every load changed; what is the same for many stages is changed once."""
    known = {id(load): load for load in loads}
    changed = {key: change(load) for key, load in known.items()}
    return [changed[id(load)] for load in loads]


def _with_edges(load: StageLoad, edges: Array) -> StageLoad:
    """Return the load with messages: a stage is as heavy as its layers, or as a message at either end that takes
    longer."""
    out = edges.copy()
    out[-1] = 0.0
    into = edges.copy()
    into[0] = 0.0

    def seconds(begin: Indices, stop: Indices) -> Array:
        return np.maximum(load.seconds(begin, stop), np.maximum(into[begin], out[stop]))

    return StageLoad(seconds, load.least or load.seconds)


class _Bands:
    """The seconds of each stage for layers j - width + k to j, in row j, column k.

    There are rows for the layers at which a stage may end if no stage is empty. They are computed on demand, and kept
    where stages share them, for all together may exceed the memory.

    Args:
        widths: by id of the load, the most layers that such a stage may have.
    """

    def __init__(self, loads: Sequence[StageLoad], n: int, widths: dict[int, int]) -> None:
        self._loads, self.layers, self._widths = loads, n, widths
        self._shared = {key for key, times in Counter(map(id, loads)).items() if times > 1}
        widest = max(widths.values())
        self._begin = np.arange(1, n + 1)[:, None] - widest + np.arange(widest)[None, :]

    @classmethod
    def within_load(cls, loads: Sequence[StageLoad], n: int, most: float) -> _Bands:
        """Return the bands in which no stage takes longer than `most`."""
        return cls(loads, n, {key: load.count_most_layers(n, most) for key, load in {id(x): x for x in loads}.items()})

    def are_in(self, others: _Bands) -> bool:
        """Return whether no stage may have more layers than with the others."""
        return all(width <= others._widths[key] for key, width in self._widths.items())

    def iter_stages(self, cost: Cost | None) -> Iterator[tuple[int, Indices, Array]]:
        """Yield the first row of each stage, the beginnings of its layers, and its costs, by default the seconds."""
        known: dict[int, Array] = {}
        stages = len(self._loads)
        for stage, load in enumerate(self._loads):
            low, high = stage + 1, self.layers - (stages - 1 - stage)
            begin = self._begin[:, -self._widths[id(load)] :]
            if id(load) in self._shared:
                if id(load) not in known:
                    known[id(load)] = _costs(load, begin, 1, cost)
                yield low, begin[low - 1 : high], known[id(load)][low - 1 : high]
            else:
                yield low, begin[low - 1 : high], _costs(load, begin[low - 1 : high], low, cost)


def _costs(load: StageLoad, begin: Indices, low: int, cost: Cost | None) -> Array:
    first = np.maximum(begin, 0)
    band = load.seconds(first, np.broadcast_to(np.arange(low, low + len(begin))[:, None], begin.shape))
    return np.where(begin >= 0, band if cost is None else cost(band, first), np.inf)


def _chosen(bands: _Bands, cost: Cost | None, late: bool = False) -> tuple[Span, ...]:
    """Return the partition with the smallest sum of costs; of equal ones that whose last stages begin early, or
    late."""
    _, choice = _best(bands, np.add, cost, late)
    cuts = [bands.layers]
    for low, begins in reversed(choice):
        cuts.append(int(begins[cuts[-1] - low]))
    cuts.reverse()
    return tuple(Span(a, b) for a, b in itertools.pairwise(cuts))


def _best(
    bands: _Bands,
    join: np.ufunc,
    cost: Cost | None = None,
    late: bool = False,
) -> tuple[Array, list[tuple[int, Indices]]]:
    """For each number of layers the smallest joined cost of all stages, and for each stage the first of its rows and
    where it begins in each."""
    value = np.full(bands.layers + 1, np.inf)
    value[0] = 0.0
    choice = []
    for low, begin, band in bands.iter_stages(cost):
        joined = join(value[np.maximum(begin, 0)], band)
        row = np.arange(len(joined))
        best = joined.argmin(axis=1)
        if late:  # sums of equal parts differ in their last digits
            close = joined <= joined[row, best, None] * (1 + 1e-12)
            best = joined.shape[1] - 1 - close[:, ::-1].argmax(axis=1)
        choice.append((low, begin[row, best]))
        value = np.full(bands.layers + 1, np.inf)
        value[low : low + len(joined)] = joined[row, best]
    return value, choice


def partition_at(cuts: Sequence[int], layers: int, stages: int) -> tuple[Span, ...]:
    """Return the layers of each stage, where `cuts` names the layers at which stages 1, 2, ... begin.

    A cut that repeats, or that stands at an end, leaves a stage empty.

    Raises:
        PlanError: not one cut fewer than stages, or cuts that are out of order or outside the model.
    """
    if len(cuts) != stages - 1:
        raise PlanError(
            f"partition={list(cuts)} makes {len(cuts) + 1} stages, and there are {stages}; give {stages - 1} "
            f"number{'s' * (stages != 2)}, the layers at which stages after the first begin"
        )
    edges = [0, *(int(c) for c in cuts), layers]
    if any(a > b for a, b in itertools.pairwise(edges)) or edges[0] < 0:
        raise PlanError(
            f"partition={list(cuts)}: the layers at which stages begin must ascend from 0 to {layers}, the number of "
            "layers"
        )
    return tuple(Span(a, b) for a, b in itertools.pairwise(edges))


def balanced_cuts(loads: npt.ArrayLike, stages: int, allowed: npt.NDArray[np.bool_] | None = None) -> Indices:
    """Return where each stage begins, and the last one ends, so that the heaviest stage is as light as can be.

    No stage is empty. Of equally good cuts every one, from the last to the first, is as early as can be.

    Args:
        loads: of each layer, in any unit; axis 0 is models, axis 1 layers.
        allowed: whether a stage may have a layer; axis 0 is stages, axis 1 layers. All may by default.

    Returns:
        Layers in shape (models, stages + 1); 0 everywhere where no cut is allowed.
    """
    layers = np.asarray(loads, np.float64)
    n, count = layers.shape
    ends = np.concatenate([np.zeros((n, 1)), np.cumsum(layers, axis=1)], axis=1)
    place = np.arange(count + 1)
    sums = np.where(place[:, None] < place, ends[:, None, :] - ends[:, :, None], np.inf)  # by begin and end
    heaviest = np.where(place == 0, np.zeros((n, 1)), np.inf)  # of the best cut of the first layers
    begins = []
    for stage in range(stages):
        wrong = place * 0 if allowed is None else np.concatenate([[0], np.cumsum(~allowed[stage])])
        cases = np.maximum(heaviest[:, :, None], np.where(wrong[:, None] == wrong, sums, np.inf))
        begins.append(cases.argmin(axis=1))
        heaviest = cases.min(axis=1)
    cuts = np.zeros((n, stages + 1), np.intp)
    cuts[:, -1] = np.where(np.isfinite(heaviest[:, -1]), count, 0)
    for stage in reversed(range(stages)):
        cuts[:, stage] = begins[stage][np.arange(n), cuts[:, stage + 1]]
    return cuts
