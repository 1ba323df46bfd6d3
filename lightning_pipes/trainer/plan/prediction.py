"""Whether the steps of a run are what its decision was made by."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from lightning.pytorch.utilities import rank_zero_warn

from lightning_pipes.sim.units import seconds_text
from lightning_pipes.trainer.plan.decision import Decision
from lightning_pipes.trainer.plan.trial import CONTRADICTION
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.reports.report import KEPT_WINDOWS, Window
from lightning_pipes.trainer.reports.timing import Share


class Prediction:
    """Looks once, when a run has had enough steps, and warns on rank 0 where they contradict what was predicted.

    Args:
        decision: what runs; one without a prediction is right.
        control: all ranks of the pipeline.
        alone: whether nobody else computes on the ranks, as siblings of an array do.
    """

    def __init__(self, decision: Decision, control: Control, alone: bool) -> None:
        self._seconds = decision.computing if alone else None
        self._rows = decision.rows
        self._cuts = [span.start for span in decision.layers[1:]]
        self._control = control

    def check(self, windows: Sequence[Window]) -> None:
        """Called after every training batch with the last ones on this rank. Collective."""
        if self._seconds is None or len(windows) < KEPT_WINDOWS:
            return
        predicted, self._seconds = self._seconds, None
        if {w.plan.jobs[0].rows for w in windows} != {self._rows} or len({id(w.plan) for w in windows}) > 1:
            return  # other batches than were predicted, or another schedule was adopted
        took = self._control.all_gather([Share.of(w.events).took for w in windows])
        measured = median(map(max, zip(*took, strict=True))) / 1e9
        if abs(measured / predicted - 1) > CONTRADICTION:
            rank_zero_warn(
                f"A step takes {seconds_text(1e9 * measured)} up to the optimizer, and "
                f"{seconds_text(1e9 * predicted)} were predicted when its stages were cut at layers {self._cuts}: the "
                "cut may not be the best. Layers stay where they are until fit ends; start it again if other "
                "processes kept the machine busy, or set PipelineStrategy(partition=[...]) by what the report of this "
                "run measures"
            )
