"""A link on a virtual clock, on which states of jobs and layers take turns without real copies."""

from __future__ import annotations

import math


class VirtualCopier:
    """Models one link in each direction on a clock that the simulation advances.

    Args:
        bandwidth: bytes per second in each direction.
        latency: additional seconds of each copy.
    """

    def __init__(self, bandwidth: float, latency: float = 0.0) -> None:
        self.now = 0
        """The current time in nanoseconds."""
        self._rate, self._latency = bandwidth, round(latency * 1e9)
        self._free = {"in": 0, "out": 0}
        self._ends: list[int] = []

    def load(self, key: object, size: int, after: int | None) -> int:
        return self._copy("in", size, 0 if after is None else self._ends[after])

    def store(self, key: object, size: int) -> int:
        return self._copy("out", size, 0)

    def free_place(self, key: object) -> None:
        """Do nothing, because virtual copies need no memory."""

    def _copy(self, way: str, size: int, earliest: int) -> int:
        takes = 0 if math.isinf(self._rate) else round(size / self._rate * 1e9)
        self._free[way] = max(self.now, self._free[way], earliest) + takes + self._latency
        self._ends.append(self._free[way])
        return len(self._ends) - 1

    def is_done(self, ticket: int) -> bool:
        return self._ends[ticket] <= self.now

    def wait(self, ticket: int) -> int:
        waited = max(0, self._ends[ticket] - self.now)
        self.now += waited
        return waited
