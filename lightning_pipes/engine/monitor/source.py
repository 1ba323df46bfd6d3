"""One place that numbers about a device or a machine come from."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float64]


class SourceError(Exception):
    """A source that can't be read, with the reason for people."""


class Source(ABC):
    """Numbers of one origin. One thread opens, reads and closes it.

    Attributes:
        name: of the source.
        metrics: what `read` returns, in order: the name of each, which begins with that of its device and ends in its
            unit. Shares are from 0 to 1; `cores` are seconds of computing in a second.
        lost: metrics that can't be had although the source can, and why, for people; the monitor says it once.
    """

    name: ClassVar[str]
    metrics: tuple[str, ...]

    def __init__(self) -> None:
        self.lost: list[str] = []

    @abstractmethod
    def open(self) -> None:
        """Gets ready.

        Raises:
            SourceError: it can't be had here, and why.
        """

    @abstractmethod
    def read(self) -> Sequence[float] | Row:
        """The metrics now, or since the last call. What is missing is not a number, and never 0: that would say that it
        was measured.

        Raises:
            Exception: of any kind: it can't be read any more, or not this time.
        """

    def close(self) -> None:  # noqa: B027  # most hold nothing
        """Gives back what it holds."""


class Rates:
    """Counters that only grow, as their growth in a second since the last call."""

    def __init__(self) -> None:
        self._at = math.nan
        self._last: Row | None = None

    def per_second(self, counters: Sequence[float] | Row, now: float | None = None) -> Row:
        """The growth of each in a second; not a number at the first call, and where one went back, as it wraps.

        Args:
            now: seconds of a clock that does not jump; by default those of this moment.
        """
        now = time.monotonic() if now is None else now
        found = np.asarray(counters, float)
        last, seconds = self._last, now - self._at
        self._last, self._at = found, now
        if last is None or len(last) != len(found) or seconds <= 0:
            return np.full(len(found), math.nan)
        grown: Row = found - last
        return np.where(grown < 0, math.nan, grown / seconds)
