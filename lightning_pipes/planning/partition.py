"""Partitions: the assignment of consecutive layers to stages."""

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
"""A function that returns the seconds, or bytes, of the layers i to j (exclusive), for arrays of i and of j."""


def even_partition(weights: Sequence[float], stages: int, degrees: Sequence[int] = ()) -> tuple[Span, ...]:
    """Return consecutive layers for each stage so that the heaviest stage is as light as possible. No stage is empty.

    Among these partitions, the result has the smallest sum of squared stage weights, so that its stages differ least.

    Args:
        weights: one weight for each layer, in any unit, such as parameters, seconds or bytes.
        stages: the number of stages.
        degrees: the number of ranks of each stage, by which the weight of the stage is divided; by default equal for
            all stages.

    Raises:
        PlanError: there are fewer layers than stages, no stages, or negative weights.
    """
    n = len(weights)
    if stages < 1:
        raise PlanError(f"a partition needs at least one stage, got {stages}")
    if n < stages:
        raise PlanError(
            f"{n} layers can't fill {stages} stages, because each stage needs at least one layer. Use fewer processes "
            "(devices x nodes), fewer stages on each process, or more layers. A given partition may leave stages empty"
        )
    if min(weights) < 0:
        raise PlanError(f"weights of layers must not be negative, got {min(weights)}")
    sums = range_sums(np.asarray(weights, dtype=float))
    of_degree = {d: StageLoad(lambda begin, stop, d=d: sums(begin, stop) / d) for d in degrees}  # type: ignore[misc]
    return evenest_partition([of_degree[d] for d in degrees] or [StageLoad(sums)] * stages, n)


def evenest_partition(loads: Sequence[StageLoad], layers: int) -> tuple[Span, ...]:
    """Return the partition with the smallest load of the heaviest stage and, among these, the smallest sum of squares.

    No stage is empty.

    Args:
        loads: the load of each stage.
        layers: the number of layers of the model, at least the number of stages.
    """
    most = min_max_load(loads, layers) * (1 + 1e-12)
    bands = _Bands.within_load(loads, layers, most)
    return _choose_partition(bands, lambda band, begin: np.where(band <= most, band, np.inf) ** 2)


def with_layer(plan: Plan, layer: int, rank: int) -> Plan:
    """Return the plan with one layer moved to the neighboring stage on `rank`.

    Raises:
        PlanError: the layer is not the first or last of its stage, or the neighboring stage is not on `rank`.
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
        f"layer {layer} can't move to rank {rank}: stages have layers {plan.layers} on ranks {plan.ranks}, and only "
        "the first or the last layer of a stage can move to a neighboring stage"
    )


def range_sums(values: Array) -> Seconds:
    """Return a function that computes the sum of the values i to j (exclusive)."""
    ends = np.concatenate([[0.0], np.cumsum(values)])
    return lambda begin, stop: np.asarray(ends[stop] - ends[begin])


Cost = Callable[[Array, Indices], Array]
"""A function that returns the cost of a stage from its seconds and its first layer."""


@dataclass(frozen=True, eq=False)
class StageLoad:
    """The time of a stage as a function of its layers. Stages that share one object are priced together.

    Attributes:
        seconds: the seconds of the layers i to j (exclusive); infinite if the stage may not have these layers.
        least: a lower bound of `seconds` that never decreases when a layer is added. The default is `seconds`, which
            must then have this property.
    """

    seconds: Seconds
    least: Seconds | None = None

    def count_most_layers(self, layers: int, most: float) -> int:
        """Return the largest number of layers, at least 1, of which some allowed range takes at most `most` seconds.

        Args:
            layers: the number of layers of the model.
            most: the seconds that the stage may take.
        """
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
    """Return the smallest possible load of the heaviest stage; infinite if there is no partition.

    If there are many stages, each of them has few layers, and pricing only short ranges of layers is much cheaper than
    pricing all pairs i and j. The result for short ranges is an upper bound, from which the largest number of layers of
    a stage follows.

    Args:
        loads: the load of each stage.
        layers: the number of layers of the model.
    """
    few = _Bands(loads, layers, dict.fromkeys(map(id, loads), min(layers, 2 * -(-layers // len(loads)) + 1)))
    bound = float(_find_best_join(few, np.maximum)[0][-1])
    enough = _Bands.within_load(loads, layers, bound)
    return bound if enough.are_in(few) else float(_find_best_join(enough, np.maximum)[0][-1])


def balanced_partitions(
    loads: Sequence[StageLoad], edges: Array, slacks: Sequence[float] = (1.0, 1.02, 1.05, 1.1, 1.2, 1.4)
) -> list[tuple[Span, ...]]:
    """Return partitions with the cheapest cuts and a maximum load of at most the smallest possible load times a slack.

    There is one limit for each slack. The partitions do not repeat, and the list begins with the smallest slack; it is
    empty if there is no partition. Among equally good partitions, two are chosen, with heavy stages as late and as
    early as possible, because schedules may treat them differently.

    Args:
        loads: the load of each stage.
        edges: the seconds of a message if a stage begins at layer i, for i from 0 to the number of layers.
        slacks: the factors by which the maximum load may exceed the smallest possible one.
    """
    n = len(edges) - 1
    whole = _list_loads(loads, lambda load: _with_edges(load, edges))
    bound = min_max_load(whole, n)
    if not np.isfinite(bound):
        return []
    bands = _Bands.within_load(whole, n, bound * max(slacks) * (1 + 1e-12))
    scale = max(float(edges[np.isfinite(edges)].max(initial=0.0)), bound)
    # The sum of the edges is minimized first, and then the unevenness of the stages.
    into = edges / scale
    found: dict[tuple[Span, ...], None] = {}
    for slack in slacks:
        limit = bound * slack * (1 + 1e-12)

        def cost(band: Array, begin: Indices, limit: float = limit) -> Array:
            return np.where(band <= limit, into[begin] + 1e-3 * (band / bound) ** 2, np.inf)

        for late in (False, True):
            found[_choose_partition(bands, cost, late)] = None
    return list(found)


def _list_loads(loads: Sequence[StageLoad], change: Callable[[StageLoad], StageLoad]) -> list[StageLoad]:
    """Return all loads after a change. An object that several stages share is changed only once."""
    known = {id(load): load for load in loads}
    changed = {key: change(load) for key, load in known.items()}
    return [changed[id(load)] for load in loads]


def _with_edges(load: StageLoad, edges: Array) -> StageLoad:
    """Return the load including messages: the maximum of the time of the layers and of the messages at both ends."""
    out = edges.copy()
    out[-1] = 0.0
    into = edges.copy()
    into[0] = 0.0

    def seconds(begin: Indices, stop: Indices) -> Array:
        return np.maximum(load.seconds(begin, stop), np.maximum(into[begin], out[stop]))

    return StageLoad(seconds, load.least or load.seconds)


class _Bands:
    """The seconds of each stage for layers j - width + k to j, in row j and column k.

    The rows contain all layers at which a stage may end if no stage is empty. Bands are computed on demand, and only
    bands that stages share are kept, because all bands together may exceed the memory.

    Args:
        loads: the load of each stage.
        n: the number of layers.
        widths: the largest number of layers of a stage, by the id of its load.
    """

    def __init__(self, loads: Sequence[StageLoad], n: int, widths: dict[int, int]) -> None:
        self._loads, self.layers, self._widths = loads, n, widths
        self._shared = {key for key, times in Counter(map(id, loads)).items() if times > 1}
        widest = max(widths.values())
        self._begin = np.arange(1, n + 1)[:, None] - widest + np.arange(widest)[None, :]

    @classmethod
    def within_load(cls, loads: Sequence[StageLoad], n: int, most: float) -> _Bands:
        """Return bands for the stages that take no longer than `most`."""
        return cls(loads, n, {key: load.count_most_layers(n, most) for key, load in {id(x): x for x in loads}.items()})

    def are_in(self, others: _Bands) -> bool:
        """Return whether `others` allows at least the same number of layers for every stage."""
        return all(width <= others._widths[key] for key, width in self._widths.items())

    def iter_stages(self, cost: Cost | None) -> Iterator[tuple[int, Indices, Array]]:
        """Yield for each stage its first row, the first layers of its ranges, and the costs of these ranges.

        Without `cost`, the costs are the seconds.
        """
        known: dict[int, Array] = {}
        stages = len(self._loads)
        for stage, load in enumerate(self._loads):
            low, high = stage + 1, self.layers - (stages - 1 - stage)
            begin = self._begin[:, -self._widths[id(load)] :]
            if id(load) in self._shared:
                if id(load) not in known:
                    known[id(load)] = _compute_costs(load, begin, 1, cost)
                yield low, begin[low - 1 : high], known[id(load)][low - 1 : high]
            else:
                yield low, begin[low - 1 : high], _compute_costs(load, begin[low - 1 : high], low, cost)


def _compute_costs(load: StageLoad, begin: Indices, low: int, cost: Cost | None) -> Array:
    first = np.maximum(begin, 0)
    band = load.seconds(first, np.broadcast_to(np.arange(low, low + len(begin))[:, None], begin.shape))
    return np.where(begin >= 0, band if cost is None else cost(band, first), np.inf)


def _choose_partition(bands: _Bands, cost: Cost | None, late: bool = False) -> tuple[Span, ...]:
    """Return the partition with the smallest sum of costs.

    Among equally good partitions, it is the one whose last stages begin as early as possible or, with `late`, as late
    as possible.
    """
    _, choice = _find_best_join(bands, np.add, cost, late)
    cuts = [bands.layers]
    for low, begins in reversed(choice):
        cuts.append(int(begins[cuts[-1] - low]))
    cuts.reverse()
    return tuple(Span(a, b) for a, b in itertools.pairwise(cuts))


def _find_best_join(
    bands: _Bands,
    join: np.ufunc,
    cost: Cost | None = None,
    late: bool = False,
) -> tuple[Array, list[tuple[int, Indices]]]:
    """Return the smallest joined cost of all stages by number of layers, and the choices that lead to it.

    A choice contains, for one stage, the number of its first row, and for each row the first layer of the stage.
    """
    value = np.full(bands.layers + 1, np.inf)
    value[0] = 0.0
    choice = []
    for low, begin, band in bands.iter_stages(cost):
        joined = join(value[np.maximum(begin, 0)], band)
        row = np.arange(len(joined))
        best = joined.argmin(axis=1)
        if late:  # the order of summation changes the last digits
            close = joined <= joined[row, best, None] * (1 + 1e-12)
            best = joined.shape[1] - 1 - close[:, ::-1].argmax(axis=1)
        choice.append((low, begin[row, best]))
        value = np.full(bands.layers + 1, np.inf)
        value[low : low + len(joined)] = joined[row, best]
    return value, choice


def partition_at(cuts: Sequence[int], layers: int, stages: int) -> tuple[Span, ...]:
    """Return the layers of each stage if stages 1, 2, ... begin at the layers in `cuts`.

    A repeated cut, or a cut at the beginning or end of the model, makes a stage empty.

    Raises:
        PlanError: the number of cuts is not `stages` - 1, or the cuts do not ascend or lie outside the model.
    """
    if len(cuts) != stages - 1:
        raise PlanError(
            f"partition={list(cuts)} defines {len(cuts) + 1} stages, but this run has {stages}. Give {stages - 1} "
            f"number{'s' * (stages != 2)}: the first layer of each stage except the first stage"
        )
    edges = [0, *(int(c) for c in cuts), layers]
    if any(a > b for a, b in itertools.pairwise(edges)) or edges[0] < 0:
        raise PlanError(
            f"partition={list(cuts)} must contain the first layers of stages in ascending order, from 0 to {layers}, "
            "the number of layers"
        )
    return tuple(Span(a, b) for a, b in itertools.pairwise(edges))


def balanced_cuts(loads: npt.ArrayLike, stages: int, allowed: npt.NDArray[np.bool_] | None = None) -> Indices:
    """Return the cuts that make the heaviest stage as light as possible.

    No stage is empty. Among equally good cuts, every cut is as early as possible, beginning with the last one.

    Args:
        loads: the load of each layer, in any unit; axis 0 is models, axis 1 is layers.
        stages: the number of stages.
        allowed: whether a stage may contain a layer; axis 0 is stages, axis 1 is layers. By default all stages may
            contain all layers.

    Returns:
        The layer at which each stage begins and, in the last column, the layer after the end of the last stage, in
        shape (models, stages + 1). All entries of a model are 0 if no cuts are allowed.
    """
    layers = np.asarray(loads, np.float64)
    n, count = layers.shape
    ends = np.concatenate([np.zeros((n, 1)), np.cumsum(layers, axis=1)], axis=1)
    place = np.arange(count + 1)
    # indexed by the begin and the end of a range
    sums = np.where(place[:, None] < place, ends[:, None, :] - ends[:, :, None], np.inf)
    heaviest = np.where(place == 0, np.zeros((n, 1)), np.inf)  # the heaviest stage of the best cut, by number of layers
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
