"""Memory that runs out on some device: fewer batches at once, before it is gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_pipes.planning.replanning import Observation

RELIEF = 1.5
"""Batches overlap again when all devices have this many times the low mark free."""


@dataclass(frozen=True)
class MemoryGuard:
    """When batches stop overlapping (DynPipe, S V-B2): each then runs alone, so that one is held and no older weights
    are. What is free is seen by a monitor; where nobody knows, nothing is guarded.

    Attributes:
        low: bytes of which more has to be free on each device; None for no such mark.
        drop: the share of what is free that may go from one look to the next; None for any.
    """

    low: int | None = None
    drop: float | None = None

    def should_serialize(self, looks: Sequence[Observation]) -> bool:
        """Whether they do now, by all looks at the plan that runs, the oldest first. What has begun ends when all are
        above RELIEF times the low mark; without one, at the first look at which nothing has fallen."""
        tight = False
        free = [look.free for look in looks]
        for before, now in pairwise([(), *free]):
            if self._short(now) or self._falls(before, now):
                tight = True
            elif all(each is None or each >= RELIEF * (self.low or 0) for each in now):
                tight = False
        return tight

    def _short(self, now: Sequence[int | None]) -> bool:
        return self.low is not None and any(each is not None and each < self.low for each in now)

    def _falls(self, before: Sequence[int | None], now: Sequence[int | None]) -> bool:
        if self.drop is None:
            return False
        known = [(a, b) for a, b in zip(before, now, strict=False) if a is not None and b is not None]
        return any(b < (1 - self.drop) * a for a, b in known)
