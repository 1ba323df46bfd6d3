"""Rows of metrics, one a sample, in little room: the last ones for features, all of them for curves."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

import numpy as np

from lightning_pipes.engine.monitor.source import Row

_P95 = 0.95


def mean_of(rows: Iterable[Row]) -> Row:
    """The mean of each column, of what there is in it; not a number where there is nothing."""
    table = np.stack([*rows])
    there = ~np.isnan(table)
    count = there.sum(axis=0)
    total = np.where(there, table, 0.0).sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), math.nan)


def p95_of(rows: Iterable[Row]) -> Row:
    """The value of each column that 95 % of what there is do not exceed; not a number where there is nothing."""
    table = np.sort(np.stack([*rows]), axis=0)  # what is missing comes last
    count = (~np.isnan(table)).sum(axis=0)
    place = np.maximum(np.ceil(_P95 * count).astype(int) - 1, 0)
    found: Row = table[place, np.arange(table.shape[1])]
    return found


class Window:
    """The last rows.

    Args:
        most: of them.
    """

    def __init__(self, most: int) -> None:
        self.rows: deque[Row] = deque(maxlen=most)

    def features(self, names: Iterable[str]) -> dict[str, float]:
        """Of each column the mean by its name, and the 95th percentile with `_p95` behind it; empty without rows."""
        if not self.rows:
            return {}
        rows = [*self.rows]
        means, highs = mean_of(rows), p95_of(rows)
        found = dict(zip(names, map(float, means), strict=True))
        return found | {f"{name}_p95": float(high) for name, high in zip(found, highs, strict=True)}


class History:
    """All rows with their times, however many: beyond `most` points, each becomes the mean of two neighbours."""

    def __init__(self, most: int = 400) -> None:
        self._most = most
        self._each = 1  # rows in a point
        self._waiting: list[Row] = []
        self.points: list[Row] = []

    def add(self, row: Row) -> None:
        """One more; its first column is the time."""
        self._waiting.append(row)
        if len(self._waiting) < self._each:
            return
        self.points.append(mean_of(self._waiting))
        self._waiting = []
        if len(self.points) >= self._most:
            pairs = zip(self.points[::2], self.points[1::2], strict=False)
            self.points = [mean_of(pair) for pair in pairs]
            self._each *= 2
