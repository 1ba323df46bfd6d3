"""Predictors that the forest is compared with (S V-A): a mean, the formula with a factor, trees, a line, a network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from lightning_pipes.strategies.dynpipe.interference.features import NAMES, Array
from lightning_pipes.strategies.dynpipe.interference.forest import train
from lightning_pipes.strategies.dynpipe.interference.models import Corrected, Formula, Model, formula_of


class Constant(Model):
    """The mean of what it has learned."""

    name: ClassVar[str] = "constant"

    def fit(self, rows: Array, ratios: Array, seed: int = 0) -> Self:
        self._mean = float(ratios.mean())
        return self

    def predict(self, rows: Array) -> Array:
        return np.full(len(rows), self._mean)


class Scaled(Model):
    """The formula, times one factor that is learned: what caches and the sibling of a core cost everybody."""

    name: ClassVar[str] = "formula x constant"

    def fit(self, rows: Array, ratios: Array, seed: int = 0) -> Self:
        self._factor = float(np.exp(np.log(ratios / formula_of(rows)).mean()))
        return self

    def predict(self, rows: Array) -> Array:
        return self._factor * formula_of(rows)


class Trees(Model):
    """A random forest of 128 trees."""

    name: ClassVar[str] = "forest"

    def fit(self, rows: Array, ratios: Array, seed: int = 0) -> Self:
        self.forest = train(rows, np.log(ratios), NAMES, seed=seed)
        return self

    def predict(self, rows: Array) -> Array:
        return np.asarray(np.exp(self.forest.predict(rows).mean(axis=1)))


@dataclass
class Learned(Model):
    """One of scikit-learn's, behind columns that are filled, compressed and scaled."""

    estimator: Any
    name: ClassVar[str] = "learned"

    def fit(self, rows: Array, ratios: Array, seed: int = 0) -> Self:
        from sklearn.impute import SimpleImputer
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import FunctionTransformer, StandardScaler

        filled = SimpleImputer(keep_empty_features=True)
        self._pipe = make_pipeline(filled, FunctionTransformer(np.log1p), StandardScaler(), self.estimator)
        self._pipe.fit(rows, np.log(ratios))
        self._range = float(np.log(ratios).min()), float(np.log(ratios).max())
        return self

    def predict(self, rows: Array) -> Array:
        # Beyond its data a line leads anywhere; a forest never says more than the most that it has seen.
        return np.asarray(np.exp(np.clip(self._pipe.predict(rows), *self._range)))


class Linear(Learned):
    """Linear regression, with a little shrinking."""

    name: ClassVar[str] = "linear"

    def __init__(self) -> None:
        from sklearn.linear_model import Ridge

        super().__init__(Ridge(1.0))


class Network(Learned):
    """A small neural network."""

    name: ClassVar[str] = "network"

    def __init__(self) -> None:
        from sklearn.neural_network import MLPRegressor

        super().__init__(
            MLPRegressor(hidden_layer_sizes=(32, 16), alpha=1e-2, max_iter=2000, early_stopping=True, random_state=0)
        )


MODELS: tuple[type[Model], ...] = (Trees, Corrected, Formula, Scaled, Linear, Network, Constant)
