"""Partitions to choose from: all, or those that only move blocks to a neighbour."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise, product

import numpy as np
import numpy.typing as npt

from lightning_pipes.ir import Span

Cuts = npt.NDArray[np.int64]
"""A partition a row: where stages 0, 1, ... begin and the last one ends, so 0 first and the number of layers last."""
MOST_STAGES = 9
"""Up to which all neighbours of a partition are gone through at once, 3 ** 8 of them; beyond that one cut moves."""


def all_partitions(may: Sequence[int], stages: int, layers: int) -> Cuts:
    """Every choice of places to cut among `may`."""
    found = [*combinations(sorted(may), stages - 1)]
    return _closed(np.array(found, np.int64).reshape(len(found), stages - 1), layers)


def neighbours(at: Sequence[int], may: Sequence[int], layers: int) -> Cuts:
    """Partitions in which every cut of `at` is where it was, or one place on or back among `may`; it itself first."""
    places = sorted({*may, *at})
    number = {place: n for n, place in enumerate(places)}
    options = [[places[m] for m in (number[a], number[a] - 1, number[a] + 1) if 0 <= m < len(places)] for a in at]
    if len(at) < MOST_STAGES:
        found = [*product(*options)]
    else:
        found = [tuple(at), *((*at[:n], o, *at[n + 1 :]) for n, those in enumerate(options) for o in those[1:])]
    rows = np.array(found, np.int64).reshape(-1, len(at))
    return _closed(rows[(np.diff(rows, axis=1) > 0).all(axis=1)], layers)


def cuts_of(layers: Sequence[Span]) -> list[int]:
    """Where stages 1, 2, ... begin."""
    return [span.start for span in layers[1:]]


def spans_of(cuts: Sequence[int]) -> tuple[Span, ...]:
    """The layers of each stage, of one row."""
    return tuple(Span(int(a), int(b)) for a, b in pairwise(cuts))


def untorn(cuts: Cuts, now: Sequence[Span], tied: Sequence[Sequence[int]]) -> npt.NDArray[np.bool_]:
    """Which of the partitions may be had from `now`: layers that share a parameter stay where they are, or go from one
    stage to one other together."""
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
