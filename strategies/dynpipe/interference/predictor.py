"""Predictors for planners: the slowdown of each stage by the neighbors of a device, and whether it is reliable."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from lightning_pipes.ir import check_number
from lightning_pipes.planning.replanning import HostedStage, Predicted
from lightning_pipes.strategies.dynpipe.interference.features import FORMULA_COLUMN, Array, feature_table
from lightning_pipes.strategies.dynpipe.interference.forest import Forest


class Model(ABC):
    """Model of the time of a stage divided by its time without neighbors, for rows with the columns `FEATURE_NAMES`."""

    name: ClassVar[str]

    def fit(self, rows: Array, ratios: Array, seed: int = 0) -> Self:
        """Train on these rows and ratios, and return this model."""
        return self

    @abstractmethod
    def predict(self, rows: Array) -> Array:
        """Return a ratio for each row."""


class Formula(Model):
    """(run + wait) / run by the counters of the scheduler, or 1 if there are none."""

    name: ClassVar[str] = "formula"

    def predict(self, rows: Array) -> Array:
        return formula_of(rows)


class CorrectedFormula(Model):
    """The formula multiplied by a factor that a forest predicts."""

    name: ClassVar[str] = "formula x forest"

    def fit(self, rows: Array, ratios: Array, seed: int = 0) -> Self:
        self.forest = Forest(rows, np.log(ratios / formula_of(rows)), seed=seed)
        return self

    def predict(self, rows: Array) -> Array:
        return np.asarray(formula_of(rows) * np.exp(self.forest.predict(rows).mean(axis=1)))


def formula_of(rows: Array) -> Array:
    """Return the ratio of the plain formula for each row, or 1 if there are no counters."""
    found = rows[:, FORMULA_COLUMN]
    return np.where(np.isnan(found), 1.0, found)


@dataclass(frozen=True, eq=False)
class Predictor:
    """Prediction of slowdowns by a formula of the scheduler's counters, multiplied by the correction of a forest.

    DynPipe (S V-A) only uses the forest.

    Planners divide the prediction for one stage by the prediction for the stage that is on the device now, whose time
    is measured. Therefore, a machine on which everything is slower by a constant factor does not cause an error. A
    prediction is marked as unknown if a value is outside of the range in training (widened by `margin`), if a value is
    missing that was never missing in training, or if the trees differ by more than `spread`.

    Args:
        forest: predicts the logarithm of the factor from the columns `features.FEATURE_NAMES`.
        margin: the share of a range by which a value may be outside of it.
        spread: the maximum standard deviation of the trees' logarithms.

    Raises:
        InputError: `margin` or `spread` is below 0.
    """

    forest: Forest
    margin: float = 0.1
    spread: float = 0.5

    def __post_init__(self) -> None:
        for name in ("margin", "spread"):
            check_number(f"predictor: {name}", getattr(self, name), "0 or more", lambda x: x >= 0)

    def predict(self, rows: Sequence[tuple[Mapping[str, float], HostedStage]]) -> Predicted:
        """Predict all rows in one call; see `planning.replanning.Interference`.

        Equal rows are predicted once, so a planner may pass the rows of a whole replan together.
        """
        places: dict[tuple[int, HostedStage], int] = {}
        index = np.array([places.setdefault((id(device), stage), len(places)) for device, stage in rows], np.intp)
        first: dict[int, tuple[Mapping[str, float], HostedStage]] = {}
        for place, row in zip(index.tolist(), rows, strict=True):
            first.setdefault(place, row)
        if not first:
            return Predicted(np.empty(0), np.empty(0, np.bool_))
        numbers = feature_table([*first.values()])
        logs = self.forest.predict(numbers)
        known = self.forest.is_familiar(numbers, self.margin) & (logs.std(axis=1) <= self.spread)
        ratios = formula_of(numbers) * np.exp(logs.mean(axis=1))
        return Predicted(ratios[index], known[index])
