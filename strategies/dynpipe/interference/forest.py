"""A random forest of scikit-learn, and the range of the rows on which it was trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_pipes.ir import InputError

Array = npt.NDArray[np.float64]
N_TREES = 128
"""The number of trees, as in DynPipe (S V-A). The code of DynPipe has 500 trees, which make the same predictions."""
SETTINGS_GRID = {"max_features": (0.5, 1.0), "min_samples_leaf": (3, 1)}
"""The settings among which cross-validation chooses: the share of columns for a split, and the rows of a leaf."""
N_FOLDS = 4
"""The number of parts in cross-validation."""
N_VALIDATION_TREES = 16
"""The number of trees in cross-validation."""
MIN_VALIDATION_ROWS = 40
"""The number of rows below which cross-validation is not informative."""


class Forest:
    """Regression trees that were trained on `values` of `rows`. Equal data gives equal trees on every rank.

    Args:
        rows: the training rows. Axis 0 is rows, in the order in which they were observed, and axis 1 is columns.
            Missing values are NaN.
        values: the value of each row.
        trees: the number of trees.
        seed: the seed of the random numbers.
        settings: values for the names of `SETTINGS_GRID`. By default, the values with the best predictions in
            cross-validation.

    Raises:
        InputError: there are too few rows, or some numbers are not finite.
    """

    def __init__(
        self, rows: Array, values: Array, trees: int = N_TREES, seed: int = 0, settings: dict[str, Any] | None = None
    ) -> None:
        from sklearn.ensemble import RandomForestRegressor

        if len(rows) < 2 or len(rows) != len(values) or not np.isfinite(values).all() or np.isinf(rows).any():
            raise InputError(
                f"training needs at least two rows of finite numbers; got shapes {rows.shape} and {values.shape}"
            )
        self.settings = select_settings(rows, values, seed) if settings is None else settings
        self.model = RandomForestRegressor(trees, random_state=seed, n_jobs=1, **self.settings).fit(rows, values)
        there = ~np.isnan(rows)
        any_there = there.any(axis=0)
        self._low = np.where(any_there, np.where(there, rows, np.inf).min(axis=0), np.nan)
        self._high = np.where(any_there, np.where(there, rows, -np.inf).max(axis=0), np.nan)
        self._gaps = ~there.all(axis=0)

    def predict(self, rows: Array) -> Array:
        """Return the prediction of each tree for each row. Axis 0 is rows, and axis 1 is trees."""
        with np.errstate(over="ignore"):  # trees compare in single precision, and infinity is compared correctly
            single = np.ascontiguousarray(rows, np.float32)
        return np.hstack([tree.tree_.predict(single) for tree in self.model.estimators_])

    def is_familiar(self, rows: Array, margin: float = 0.1) -> npt.NDArray[np.bool_]:
        """Return whether each row lies within the range of the training rows.

        Every value has to be in the range of its column in training, widened by the share `margin` at both ends. A
        value may be missing only if it was missing in a training row, too. A column that was always missing in training
        is not checked. Beyond the training data, trees make the same prediction as at its edge, so they are not
        reliable for other rows.
        """
        room = margin * (self._high - self._low)
        inside = (rows >= self._low - room) & (rows <= self._high + room)
        return np.asarray((np.isnan(self._low) | inside | (np.isnan(rows) & self._gaps)).all(axis=1))


def select_settings(rows: Array, values: Array, seed: int = 0) -> dict[str, Any]:
    """Return the settings with the lowest squared error in cross-validation over parts of consecutive rows.

    Consecutive rows had the same neighbors, so random parts would favor trees that overfit. If there are fewer than
    `MIN_VALIDATION_ROWS` rows, the first values of `SETTINGS_GRID` are returned.
    """
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.model_selection import GridSearchCV, KFold

    if len(rows) < MIN_VALIDATION_ROWS:
        return {name: choices[0] for name, choices in SETTINGS_GRID.items()}
    forest = RandomForestRegressor(N_VALIDATION_TREES, random_state=seed)
    search = GridSearchCV(forest, SETTINGS_GRID, scoring="neg_mean_squared_error", cv=KFold(N_FOLDS), refit=False)
    found: dict[str, Any] = search.fit(rows, values).best_params_
    return found
