"""Estimated step times of other partitions in past observations, and the choice of how many observations to use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from lightning_pipes.ir import Kind, Plan, Span
from lightning_pipes.planning.replanning import Observation
from lightning_pipes.strategies.dynpipe.partitions import Cuts, spans_of
from lightning_pipes.strategies.dynpipe.repartition import WindowReplay

Array = npt.NDArray[np.float64]
MIN_RULE_GAIN = 0.002
"""The minimum share of time by which another rule must have been better than choosing by few observations."""
EVALUATION_PERIODS = 2
"""The duration for which a new partition is evaluated, as a multiple of the observations needed for a move.

The planner needs the same number of observations again before it can make the next move.
"""


def select_history_length(last: Array, at: int, least: float) -> int | None:
    """Return the best partition by the last observations, or None if the current partition should stay.

    The observations are divided into two halves. The partition that is best in one half has to save the share `least`
    of a step in the other half. Otherwise, it may fit a situation that has already passed.

    Args:
        last: the seconds of a step. Axis 0 is observations, and axis 1 is partitions.
        at: the index of the current partition.
        least: the share of a step that a move has to save.
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
    """Return the number of past observations by which to choose a partition, or a partition to stay with.

    The number is `shortest`, twice as many, four times as many, and so on. Each rule is evaluated on the past
    observations, by the total time of all steps if a planner had followed the rule. If neighbors stay for long, few
    observations are best, because they show a change first. If neighbors leave soon, few observations are out of date,
    and it is better to choose by many observations or not to move.

    Args:
        seconds: the seconds of a step. Axis 0 is observations, the oldest first, and axis 1 is partitions.
        at: the index of the current partition.
        stays: the partitions with which the planner could stay.
        shortest: the number of observations that are enough for a move.
        least: the share of a step that a move has to save.

    Returns:
        The number of observations, and the index of the partition to stay with or None.
    """
    numbers = [shortest]
    while 2 * numbers[-1] < len(seconds):
        numbers.append(2 * numbers[-1])
    then = np.stack([seconds[now : now + EVALUATION_PERIODS * shortest].mean(axis=0) for now in range(len(seconds))])
    totals = [_total(seconds, then, at, number, least) for number in numbers]
    longer = int(np.argmin(totals))
    stay = min(stays, key=lambda n: float(then[1:, n].sum()))
    enough = (1 - MIN_RULE_GAIN) * totals[0]
    stays_for = then[1:, stay].sum()
    if stays_for != totals[0] and stays_for < min(totals[0], totals[longer]) + least / 2 * seconds[:, at].mean():
        return len(seconds), stay
    return (numbers[longer] if totals[longer] < enough else shortest), None


def _total(seconds: Array, then: Array, at: int, number: int, least: float) -> float:
    """Return the total seconds of steps if a planner always chose by the mean of the last `number` observations.

    The first observation is left out. The planner keeps partition `at` unless another partition saves the share
    `least`.
    """
    total = 0.0
    for now in range(1, len(seconds)):
        mean = seconds[max(0, now - number) : now].mean(axis=0)
        best = int(mean.argmin())
        total += float(then[now, best if mean[best] < (1 - least) * mean[at] else at])
    return total


class History:
    """The estimated seconds of a step with several partitions in every past observation.

    The partitions are the best one of each observation, and all partitions that ran. The estimates are rough: each
    stage is scaled by the mean factor by which its device was slowed down, the slowest stage determines the time, and
    messages take no time.

    Args:
        windows: the replay of the last observations.
        cuts: the partitions among which to choose.
        looks: the observations of the current plan and of earlier plans, the oldest first.
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
            """Return the seconds of a step. Axis 0 is partitions, and axis 1 is observations."""
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
        """Return whether another partition should run, by the last `counted` observations."""
        return select_history_length(self._seconds[-counted:], int(self._ran[-1]), least) is not None

    def count_windows(self, shortest: int, least: float) -> tuple[int, tuple[Span, ...] | None]:
        """Return the number of past observations to use, and the layers of each stage to stay with, or None."""
        number, stay = looks_that_count(self._seconds, int(self._ran[-1]), self._may, shortest, least)
        return number, None if stay is None else spans_of(self._cuts[stay])
