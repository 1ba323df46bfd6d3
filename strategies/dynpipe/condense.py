"""A model as fewer blocks, between which it may be cut."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import numpy as np
import numpy.typing as npt

from lightning_pipes.ir import PlanError

Array = npt.NDArray[np.float64]
ALIKE = 0.05
"""Layers whose weights differ by less than this share count as equally heavy: no measurement is more exact."""
MOST_PARTITIONS = 20_000
"""Partitions that are gone through at a time."""


def condensed(weights: Sequence[float], k: int) -> tuple[int, ...]:
    """The k - 1 layers at which blocks 1, 2, ... begin (DynPipe, S V-B1, Algorithm 2, Condense).

    The k heaviest layers end a block each: it begins after the one before, and the last one takes all that follow too,
    of which the paper says nothing. Seconds, parameters and memory of a block are sums from the last kept layer to this
    one, not of its last two layers as printed, and what it hands on is the value at its end. Of layers that are equally
    heavy, within `ALIKE`, those are kept that are evenly apart.

    Args:
        weights: of each layer the seconds of its forward and backward and of its output's way there and back.

    Raises:
        PlanError: k is below 1.
    """
    if k < 1:
        raise PlanError(f"a model has at least one block, got top_k={k}")
    n = len(weights)
    if k >= n:
        return tuple(range(1, n))
    kept: list[int] = []
    left = sorted(range(n), key=lambda layer: -weights[layer])
    while len(kept) < k:
        least = weights[left[0]] * (1 - ALIKE)
        same = sorted(layer for layer in left if weights[layer] >= least)
        left = [layer for layer in left if weights[layer] < least]
        free = min(k - len(kept), len(same))
        kept += [same[(2 * n + 1) * len(same) // (2 * free)] for n in range(free)]
    return tuple(layer + 1 for layer in sorted(kept)[:-1])


def affordable_blocks(stages: int, layers: int) -> int:
    """The most blocks whose partitions into so many stages are at most `MOST_PARTITIONS`; one a stage at least."""
    k = stages
    while k < layers and comb(k, stages - 1) <= MOST_PARTITIONS:
        k += 1
    return k


def layer_weights(seconds: Array, output: Array, bandwidth: float) -> list[float]:
    """The weights that `condensed` ranks layers by: p_f + p_b + 2 a / b.

    Args:
        seconds: of a forward and a backward of each layer.
        output: bytes of its output, which come back as gradients.
        bandwidth: of the slowest link.
    """
    found: list[float] = (seconds + 2 * output / bandwidth).tolist()
    return found
