"""A forest as planners ask it: how much a device's neighbours would slow each stage down, and whether it knows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import numpy as np

from lightning_pipes.ir import InputError, check_number
from lightning_pipes.planning.replanning import HostedStage, Predicted
from lightning_pipes.strategies.dynpipe.interference.features import FORMULA_AT, NAMES, Array, feature_table
from lightning_pipes.strategies.dynpipe.interference.forest import Forest, train


class Model(ABC):
    """Predicts ratios of a stage's time to that without neighbours, from rows with the columns `NAMES`."""

    name: ClassVar[str]

    def fit(self, rows: Array, ratios: Array, seed: int = 0) -> Self:
        """Learn the ratios of these rows, and return this predictor."""
        return self

    @abstractmethod
    def predict(self, rows: Array) -> Array:
        """Return a ratio for each row."""


class Formula(Model):
    """(run + wait) / run as the scheduler has counted it; 1 where it has not."""

    name: ClassVar[str] = "formula"

    def predict(self, rows: Array) -> Array:
        return formula_of(rows)


class CorrectedFormula(Model):
    """The formula, times a factor that a forest has learned."""

    name: ClassVar[str] = "formula x forest"

    def fit(self, rows: Array, ratios: Array, seed: int = 0) -> Self:
        self.forest = train(rows, np.log(ratios / formula_of(rows)), NAMES, seed=seed)
        return self

    def predict(self, rows: Array) -> Array:
        return np.asarray(formula_of(rows) * np.exp(self.forest.predict(rows).mean(axis=1)))


def formula_of(rows: Array) -> Array:
    """Return the plain formula's ratio of each row; 1 where nothing was counted."""
    found = rows[:, FORMULA_AT]
    return np.where(np.isnan(found), 1.0, found)


@dataclass(frozen=True, eq=False)
class Predictor:
    """Predict slow-downs as a formula of the scheduler's counters times a correction by a forest (DynPipe, S V-A, which
    has the forest alone).

    Planners take its answer for one stage over that for the stage that is on the device now, of which the time is
    measured; so a machine on which everything is slower by some factor is no error. It does not know rows whose numbers
    are outside of the ranges of the training (widened by `margin`), rows that lack a number which training always had,
    and rows of which its trees disagree by more than `spread`.

    Args:
        forest: of the logarithm of the factor, on the columns of `features.NAMES`.
        margin: by which share of a range a number may be outside of it.
        spread: standard deviation of the trees' logarithms.

    Raises:
        InputError: the forest is of other columns.
    """

    forest: Forest
    margin: float = 0.1
    spread: float = 0.5

    def __post_init__(self) -> None:
        if self.forest.names != NAMES:
            odd = [name for name in (*self.forest.names, *NAMES) if (name in self.forest.names) != (name in NAMES)]
            raise InputError(
                f"the forest is of other columns than this version has ({', '.join(odd) or 'in another order'}); train "
                "another by `lightning-pipes interference`"
            )
        for name in ("margin", "spread"):
            check_number(f"predictor: {name}", getattr(self, name), "0 or more", lambda x: x >= 0)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a forest that `Forest.save` wrote.

        Raises:
            InputError: there is none.
        """
        return cls(Forest.load(path))

    def predict(self, rows: Sequence[tuple[Mapping[str, float], HostedStage]]) -> Predicted:
        """Predict all rows in one call, see `planning.replanning.Interference`.

        Equal rows count once, so a whole re-plan may be asked at a time.
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
