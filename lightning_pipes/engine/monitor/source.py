"""The interface of a source of numbers about a device or a machine."""

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
    """A source that can't be read, with a readable reason."""


class Source(ABC):
    """Numbers of one origin. One thread opens, reads and closes it.

    Attributes:
        name: of the source.
        metrics: what `read` returns, in order: the name of each, which begins with that of its device and ends in its
            unit. Shares are from 0 to 1; `cores` are seconds of computing in a second.
        lost: unavailable metrics of an available source, with readable reasons; the monitor logs each once.
    """

    name: ClassVar[str]
    metrics: tuple[str, ...]

    def __init__(self) -> None:
        self.lost: list[str] = []

    @abstractmethod
    def open(self) -> None:
        """Prepare the source.

        Raises:
            SourceError: it is not available here, with the reason.
        """

    @abstractmethod
    def read(self) -> Sequence[float] | Row:
        """Return the metrics now, or since the last call. A missing metric is NaN and never 0, which would count as
        measured.

        Raises:
            Exception: of any kind: it can't be read any more, or not this time.
        """

    def close(self) -> None:  # noqa: B027  # most hold nothing
        """Release resources."""


class Rates:
    """Converts counters that only grow into their growth per second since the last call."""

    def __init__(self) -> None:
        self._at = math.nan
        self._last: Row | None = None

    def per_second(self, counters: Sequence[float] | Row, now: float | None = None) -> Row:
        """Return the growth of each counter per second; NaN at the first call, and where one went back, as it wraps.

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
