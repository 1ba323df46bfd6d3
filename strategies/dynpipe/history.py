"""Looks at devices under all plans that ran lately, and the seconds that other partitions would have taken there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_pipes.ir import Kind, Plan, Span
from lightning_pipes.planning.replanning import Observation
from lightning_pipes.strategies.dynpipe.hindsight import looks_that_count, wanted
from lightning_pipes.strategies.dynpipe.partitions import Cuts, spans_of
from lightning_pipes.strategies.dynpipe.repartition import Windows


class History:
    """Seconds of a step in every look of partitions that come into question for some of them: the best of each, and all
    that ran. They are rough: a stage takes as much longer as its device took then, on the average, all follow the
    slowest, and messages take no time.

    Args:
        windows: the last ones.
        cuts: the partitions that may be had.
        looks: the last ones, of this plan and earlier ones, the oldest first.
    """

    def __init__(self, windows: Windows, cuts: Cuts, looks: Sequence[tuple[Plan, Observation]]) -> None:
        now = windows.now
        were = np.array([[0, *(span.stop for span in plan.layers)] for plan, _ in looks], np.int64)
        plans, which = np.unique(were, axis=0, return_inverse=True)
        which = which.reshape(-1)
        every = np.vstack([plans, cuts])
        alone = now.alone(every)
        factors = np.array([look.stage_seconds for _, look in looks]) / alone[which]
        pieces = np.inf if windows.order.is_endless else len(now.plan.spans(Kind.F, 0))

        def seconds(of: np.ndarray) -> np.ndarray:
            """Axis 0 is partitions, axis 1 looks."""
            stages = alone[of][:, None, :] * factors[None]
            return np.asarray(stages.max(axis=2) + stages.sum(axis=2) / pieces)

        best = seconds(np.arange(len(every))).argmin(axis=0)
        chosen, place = np.unique(np.concatenate([which, best]), return_inverse=True)
        self._seconds = seconds(chosen).T
        self._cuts = every[chosen]
        self._ran = place.reshape(-1)[: len(looks)]
        at = int(self._ran[-1])
        ran = dict.fromkeys(self._ran.tolist())
        self._may = [n for n in ran if n == at or (cuts == self._cuts[n]).all(axis=1).any()]

    def wants(self, counted: int, least: float) -> bool:
        """Whether the last looks want another partition than the one that runs."""
        return wanted(self._seconds[-counted:], int(self._ran[-1]), least) is not None

    def counted(self, shortest: int, least: float) -> tuple[int, tuple[Span, ...] | None]:
        """How many of the last looks count, and the layers of stages to stay with, if one should."""
        number, stay = looks_that_count(self._seconds, int(self._ran[-1]), self._may, shortest, least)
        return number, None if stay is None else spans_of(self._cuts[stay])
