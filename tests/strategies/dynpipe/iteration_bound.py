"""A lower bound for the seconds of an iteration of a pipeline that does not flush."""

from __future__ import annotations

from collections.abc import Sequence


def least_seconds(stages: Sequence[float], transfers: Sequence[float]) -> float:
    """Return a lower bound for the seconds of an iteration.

    At most S - s + 1 batches are in flight on stages s to S, and each of them goes to the last stage and back.
    """
    way, least, n = 0.0, max(stages), len(stages)
    for s in reversed(range(n)):
        way += stages[s] + (transfers[s] if s < n - 1 else 0.0)
        least = max(least, way / (n - s))
    return least
