"""Looks at devices under all plans that ran lately, and the seconds that other partitions would have taken there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from lightning_pipes.ir import Kind, Plan, Span
from lightning_pipes.planning.replanning import Observation
from lightning_pipes.strategies.dynpipe.partitions import Cuts, spans_of
from lightning_pipes.strategies.dynpipe.repartition import WindowReplay

Array = npt.NDArray[np.float64]
BETTER = 0.002
"""By what share something else must have served better than to go by few looks."""
STAYS = 2
"""How many times as many looks as it takes to move one stays there, about: it takes as many to want to go on."""


def select_history_length(last: Array, at: int, least: float) -> int | None:
    """Return the partition to take by the last looks, for one that runs; None for none. Chosen by either half of the
    looks it has to save the share `least` of a step in the other half: else it suits what is over already.

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
    stay with. Each is tried on what was seen so far: how long would all steps have taken with it?

    Where neighbours stay for long, few looks serve best, for they show soonest what has changed. Where they soon go,
    few looks are out of date, and choosing by many, or staying, is better.

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
    """Return the seconds after every look but the first one of a planner that averages the `number` looks before it and
    keeps `at` if none is better."""
    total = 0.0
    for now in range(1, len(seconds)):
        mean = seconds[max(0, now - number) : now].mean(axis=0)
        best = int(mean.argmin())
        total += float(then[now, best if mean[best] < (1 - least) * mean[at] else at])
    return total


class History:
    """Seconds of a step in every look of partitions that come into question for some of them: the best of each, and all
    that ran. They are rough: a stage takes as much longer as its device took then, on the average, all follow the
    slowest, and messages take no time.

    Args:
        windows: the last ones.
        cuts: the partitions that may be had.
        looks: the last ones, of this plan and earlier ones, the oldest first.
    """

    def __init__(self, windows: WindowReplay, cuts: Cuts, looks: Sequence[tuple[Plan, Observation]]) -> None:
        now = windows.now
        were = np.array([[0, *(span.stop for span in plan.layers)] for plan, _ in looks], np.int64)
        plans, which = np.unique(were, axis=0, return_inverse=True)
        which = which.reshape(-1)
        every = np.vstack([plans, cuts])
        alone = now.undisturbed_durations(every)
        factors = np.array([look.stage_seconds for _, look in looks]) / alone[which]
        pieces = np.inf if windows.order.is_endless else len(now.plan.spans(Kind.F, 0))

        def stack_seconds(of: np.ndarray) -> np.ndarray:
            """Axis 0 is partitions, axis 1 looks."""
            stages = alone[of][:, None, :] * factors[None]
            return np.asarray(stages.max(axis=2) + stages.sum(axis=2) / pieces)

        best = stack_seconds(np.arange(len(every))).argmin(axis=0)
        chosen, place = np.unique(np.concatenate([which, best]), return_inverse=True)
        self._seconds = stack_seconds(chosen).T
        self._cuts = every[chosen]
        self._ran = place.reshape(-1)[: len(looks)]
        at = int(self._ran[-1])
        ran = dict.fromkeys(self._ran.tolist())
        self._may = [n for n in ran if n == at or (cuts == self._cuts[n]).all(axis=1).any()]

    def select_length(self, counted: int, least: float) -> bool:
        """Return whether the last looks want another partition than the one that runs."""
        return select_history_length(self._seconds[-counted:], int(self._ran[-1]), least) is not None

    def count_windows(self, shortest: int, least: float) -> tuple[int, tuple[Span, ...] | None]:
        """How many of the last looks count, and the layers of stages to stay with, if one should."""
        number, stay = looks_that_count(self._seconds, int(self._ran[-1]), self._may, shortest, least)
        return number, None if stay is None else spans_of(self._cuts[stay])
