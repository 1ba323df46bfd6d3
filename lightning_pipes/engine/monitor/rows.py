"""Rows of metrics, one a sample, in bounded memory: the last ones for features, all of them for curves.

Each value counts for the seconds since the last sample that had its metric. Samples are not evenly spaced, and a rate
covers the whole time between two of them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from lightning_pipes.engine.monitor.source import Row

_P95 = 0.95
_ROUNDING = 1e-9


class Sample(NamedTuple):
    """A row of metrics.

    Attributes:
        values: NaN for what is missing.
        seconds: that each value stands for.
    """

    values: Row
    seconds: Row


def mean_of(samples: Iterable[Sample]) -> Sample:
    """Return the mean of each column over time, and the seconds of it; NaN for a column without values."""
    values, seconds = _tables(samples)
    total = seconds.sum(axis=0)
    weighted = (np.where(seconds > 0, values, 0.0) * seconds).sum(axis=0)
    return Sample(np.where(total > 0, weighted / np.where(total > 0, total, 1.0), math.nan), total)


def p95_of(samples: Iterable[Sample]) -> Row:
    """Return the value that each column does not exceed for 95 % of the time; NaN for a column without values."""
    values, seconds = _tables(samples)
    order = np.argsort(values, axis=0)  # what is missing is last
    until = np.cumsum(np.take_along_axis(seconds, order, axis=0), axis=0)
    place = (until < (_P95 - _ROUNDING) * until[-1]).sum(axis=0)
    found: Row = np.take_along_axis(values, np.take_along_axis(order, place[None], axis=0), axis=0)[0]
    return found


def _tables(samples: Iterable[Sample]) -> tuple[Row, Row]:
    values, seconds = (np.stack(each) for each in zip(*samples, strict=True))
    return values, np.where(np.isnan(values), 0.0, seconds)


class SampleWindow:
    """The last samples.

    Args:
        most: samples.
        seconds: of the past that they cover; older ones are dropped.
    """

    def __init__(self, most: int, seconds: float = math.inf) -> None:
        self._seconds = seconds
        self._covered: deque[float] = deque(maxlen=most)
        self.samples: deque[Sample] = deque(maxlen=most)

    def add(self, sample: Sample, covers: float) -> None:
        """Add a sample.

        Args:
            covers: seconds since the last one.
        """
        self.samples.append(sample)
        self._covered.append(covers)
        while sum(self._covered) - self._covered[0] >= self._seconds:
            self.samples.popleft()
            self._covered.popleft()

    def features(self, names: Iterable[str]) -> dict[str, float]:
        """Return the mean of each column by its name, and the 95th percentile with `_p95` behind it."""
        if not self.samples:
            return {}
        means, highs = mean_of(self.samples).values, p95_of(self.samples)
        found = dict(zip(names, map(float, means), strict=True))
        return found | {f"{name}_p95": float(high) for name, high in zip(found, highs, strict=True)}


class SampleHistory:
    """All samples with their times, in bounded memory: beyond `most` points, each becomes the mean of two
    neighbours."""

    def __init__(self, most: int = 400) -> None:
        self._most = most
        self._each = 1  # samples in a point
        self._waiting: list[Sample] = []
        self._points: list[Sample] = []

    def add(self, sample: Sample) -> None:
        """Add a sample; its first column is the time."""
        self._waiting.append(sample)
        if len(self._waiting) < self._each:
            return
        self._points.append(mean_of(self._waiting))
        self._waiting = []
        if len(self._points) >= self._most:
            pairs = zip(self._points[::2], self._points[1::2], strict=False)
            self._points = [mean_of(pair) for pair in pairs]
            self._each *= 2

    @property
    def points(self) -> Sequence[Row]:
        """Rows, the oldest first."""
        return [point.values for point in self._points]
