"""Partitions among which to choose: all of them, or only those that move blocks to a neighboring stage."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise, product
from math import comb

import numpy as np
import numpy.typing as npt

from lightning_pipes.ir import PlanError, Span

Cuts = npt.NDArray[np.int64]
"""One partition per row: the layers at which stages 0, 1, ... begin, followed by the number of layers."""
MAX_LISTED_STAGES = 9
"""The maximum number of stages for which all neighbors of a partition are listed, up to 3 ** 8 of them.

With more stages, only one cut moves at a time.
"""


def all_partitions(may: Sequence[int], stages: int, layers: int) -> Cuts:
    """Return every partition of `layers` layers into `stages` stages whose cuts are among `may`."""
    found = [*combinations(sorted(may), stages - 1)]
    return _closed(np.array(found, np.int64).reshape(len(found), stages - 1), layers)


def list_neighbours(at: Sequence[int], may: Sequence[int], layers: int) -> Cuts:
    """Return the partitions in which every cut of `at` stays or moves by one place among `may`.

    The first row is the partition `at` itself.

    Args:
        at: the layers at which stages 1, 2, ... begin.
        may: the layers at which a stage may begin.
        layers: the number of layers.
    """
    places = sorted({*may, *at})
    number = {place: n for n, place in enumerate(places)}
    options = [[places[m] for m in (number[a], number[a] - 1, number[a] + 1) if 0 <= m < len(places)] for a in at]
    if len(at) < MAX_LISTED_STAGES:
        found = [*product(*options)]
    else:
        found = [tuple(at), *((*at[:n], o, *at[n + 1 :]) for n, those in enumerate(options) for o in those[1:])]
    rows = np.array(found, np.int64).reshape(-1, len(at))
    return _closed(rows[(np.diff(rows, axis=1) > 0).all(axis=1)], layers)


def cuts_of(layers: Sequence[Span]) -> list[int]:
    """Return the layers at which stages 1, 2, ... begin."""
    return [span.start for span in layers[1:]]


def spans_of(cuts: Sequence[int]) -> tuple[Span, ...]:
    """Return the layers of each stage for one row of `Cuts`."""
    return tuple(Span(int(a), int(b)) for a, b in pairwise(cuts))


def keeps_tied_layers(cuts: Cuts, now: Sequence[Span], tied: Sequence[Sequence[int]]) -> npt.NDArray[np.bool_]:
    """Return for each partition whether it can be reached from `now` with respect to layers that share a parameter.

    Such layers have to stay where they are, or move together from one stage to one other stage.

    Args:
        cuts: the partitions, one per row.
        now: the current layers of each stage.
        tied: groups of layer numbers. The layers of a group share a parameter.
    """
    keep = np.ones(len(cuts), bool)
    before = np.array([span.start for span in now[1:]])
    for group in tied:
        layers = np.array(group)
        were = np.searchsorted(before, layers, side="right")
        are = (cuts[:, 1:-1, None] <= layers).sum(axis=1)
        same = (are == were).all(axis=1)
        together = (are == are[:, :1]).all(axis=1) & bool((were == were[0]).all())
        keep &= same | together
    return keep


def _closed(inner: Cuts, layers: int) -> Cuts:
    rows = len(inner)
    return np.hstack([np.zeros((rows, 1), np.int64), inner, np.full((rows, 1), layers, np.int64)])


Array = npt.NDArray[np.float64]
EQUAL_LAYER_TOLERANCE = 0.05
"""The relative difference below which two layers count as equally heavy, because measurements are not more precise."""
MAX_PARTITIONS = 20_000
"""The maximum number of partitions that are evaluated at a time."""


def condense_layers(weights: Sequence[float], k: int) -> tuple[int, ...]:
    """Return the k - 1 layers at which blocks 1, 2, ... begin (DynPipe, S V-B1, Algorithm 2, Condense).

    Each of the k heaviest layers ends a block, which begins after the block before it. The last block also contains all
    layers that follow, which the paper does not mention. The seconds, parameters and memory of a block are sums from
    the layer after the previous kept layer to this one, not of its last two layers as printed. The output of a block is
    the output of its last layer. Among layers that are equally heavy, within `EQUAL_LAYER_TOLERANCE`, evenly spaced
    ones are kept.

    Args:
        weights: for each layer, the seconds of its forward and backward, and of its output and the gradient of its
            output on the link.
        k: the number of blocks.

    Raises:
        PlanError: k is below 1.
    """
    if k < 1:
        raise PlanError(f"top_k must be at least 1, because a model has at least one block; got top_k={k}")
    n = len(weights)
    if k >= n:
        return tuple(range(1, n))
    kept: list[int] = []
    left = sorted(range(n), key=lambda layer: -weights[layer])
    while len(kept) < k:
        least = weights[left[0]] * (1 - EQUAL_LAYER_TOLERANCE)
        same = sorted(layer for layer in left if weights[layer] >= least)
        left = [layer for layer in left if weights[layer] < least]
        free = min(k - len(kept), len(same))
        kept += [same[(2 * n + 1) * len(same) // (2 * free)] for n in range(free)]
    return tuple(layer + 1 for layer in sorted(kept)[:-1])


def affordable_blocks(stages: int, layers: int) -> int:
    """Return the largest number of blocks with at most `MAX_PARTITIONS` partitions, at least one block per stage."""
    k = stages
    while k < layers and comb(k, stages - 1) <= MAX_PARTITIONS:
        k += 1
    return k


def layer_weights(seconds: Array, output: Array, bandwidth: float) -> list[float]:
    """Return the weights by which `condense_layers` ranks layers: p_f + p_b + 2 a / b.

    Args:
        seconds: the seconds of a forward and a backward of each layer.
        output: the bytes of the output of each layer. Its gradient has the same size.
        bandwidth: the bandwidth of the slowest link in bytes per second.
    """
    found: list[float] = (seconds + 2 * output / bandwidth).tolist()
    return found
