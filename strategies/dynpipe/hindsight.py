"""How many looks should count, by what would have served best so far."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
BETTER = 0.002
"""By what share something else must have served better than to go by few looks."""
STAYS = 2
"""How many times as many looks as it takes to move one stays there, about: it takes as many to want to go on."""


def wanted(last: Array, at: int, least: float) -> int | None:
    """The partition to take by the last looks, for one that runs; None for none. Chosen by either half of the looks it
    has to save the share `least` of a step in the other half: else it suits what is over already.

    Args:
        last: seconds of a step: axis 0 is looks, axis 1 partitions.
        at: the partition that runs.
    """
    half = len(last) // 2
    parts = [last[:half].mean(axis=0), last[half:].mean(axis=0)] if half else [last.mean(axis=0)]
    for by, then in zip(parts, reversed(parts), strict=True):
        if then[int(by.argmin())] >= (1 - least) * then[at]:
            return None
    return int(last.mean(axis=0).argmin())


def looks_that_count(
    seconds: Array, at: int, stays: Iterable[int], shortest: int, least: float
) -> tuple[int, int | None]:
    """How many of the last looks to choose a partition by: `shortest`, or twice as many and so on; or the partition to
    stay with. Each is tried on what was seen so far: who had chosen so before every look, had taken how long?

    Where neighbours stay for long, few looks serve best, for they tell soonest what has changed. Where they soon go it
    is over what few looks tell, and who goes by many, or stays, is better off.

    Args:
        seconds: of a step: axis 0 is looks, the oldest first, axis 1 partitions.
        at: the partition that runs.
        stays: those that one could stay with.
        shortest: looks that are enough for a move.
        least: the share of a step that a move has to save.
    """
    numbers = [shortest]
    while 2 * numbers[-1] < len(seconds):
        numbers.append(2 * numbers[-1])
    then = np.stack([seconds[now : now + STAYS * shortest].mean(axis=0) for now in range(len(seconds))])
    totals = [_total(seconds, then, at, number, least) for number in numbers]
    longer = int(np.argmin(totals))
    stay = min(stays, key=lambda n: float(then[1:, n].sum()))
    enough = (1 - BETTER) * totals[0]
    stays_for = then[1:, stay].sum()
    if stays_for != totals[0] and stays_for < min(totals[0], totals[longer]) + least / 2 * seconds[:, at].mean():
        return len(seconds), stay
    return (numbers[longer] if totals[longer] < enough else shortest), None


def _total(seconds: Array, then: Array, at: int, number: int, least: float) -> float:
    """Seconds after every look but the first one, as in `then`, of who goes by the `number` looks before it, and takes
    `at` if none is better."""
    total = 0.0
    for now in range(1, len(seconds)):
        mean = seconds[max(0, now - number) : now].mean(axis=0)
        best = int(mean.argmin())
        total += float(then[now, best if mean[best] < (1 - least) * mean[at] else at])
    return total
