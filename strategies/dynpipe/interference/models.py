"""Ways to predict a slow-down from a row of numbers: the plain formula, and the formula times a forest (S V-A).

A forest learns the logarithm: a stage that is slowed down 2 times is as far from 1 as from 4.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Self

import numpy as np

from lightning_pipes.strategies.dynpipe.interference.features import FORMULA_AT, NAMES, Array
from lightning_pipes.strategies.dynpipe.interference.forest import train


class Model(ABC):
    """Predicts ratios of a stage's time to that without neighbours, from rows with the columns `NAMES`."""

    name: ClassVar[str]

    def fit(self, rows: Array, ratios: Array, seed: int = 0) -> Self:
        """Itself, having learned that these rows had these ratios."""
        return self

    @abstractmethod
    def predict(self, rows: Array) -> Array:
        """A ratio for each row."""


class Formula(Model):
    """(run + wait) / run as the scheduler has counted it; 1 where it has not."""

    name: ClassVar[str] = "formula"

    def predict(self, rows: Array) -> Array:
        return formula_of(rows)


class Corrected(Model):
    """The formula, times a factor that a forest has learned."""

    name: ClassVar[str] = "formula x forest"

    def fit(self, rows: Array, ratios: Array, seed: int = 0) -> Self:
        self.forest = train(rows, np.log(ratios / formula_of(rows)), NAMES, seed=seed)
        return self

    def predict(self, rows: Array) -> Array:
        return np.asarray(formula_of(rows) * np.exp(self.forest.predict(rows).mean(axis=1)))


def formula_of(rows: Array) -> Array:
    """The plain formula's ratio of each row; 1 where nothing was counted."""
    found = rows[:, FORMULA_AT]
    return np.where(np.isnan(found), 1.0, found)
