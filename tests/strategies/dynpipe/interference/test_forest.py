"""Check the settings of the forest, its predictions, and the rows that it knows."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_pipes.ir import InputError
from lightning_pipes.strategies.dynpipe.interference.forest import Forest, select_settings

COARSE = {"max_features": 0.5, "min_samples_leaf": 3}
CANDIDATES = [{"max_features": share, "min_samples_leaf": leaf} for share in (0.5, 1.0) for leaf in (3, 1)]


def data(rows: int = 300, missing: float = 0.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 3))
    y = np.sin(3 * x[:, 0]) + (x[:, 1] > 0.3) * x[:, 2]
    x[random.random(x.shape) < missing] = np.nan
    return x, y


@pytest.mark.parametrize("missing", [0.0, 0.2])
def test_trees_predict_the_mean_of_scikit_learn(missing):
    forest = Forest(*data(missing=missing), trees=12)
    new = np.concatenate([data(500, missing=0.3, seed=1)[0], [[np.nan] * 3, [1e30, -1e30, 0]]])
    assert forest.predict(new).shape == (502, 12)
    np.testing.assert_allclose(forest.predict(new).mean(axis=1), forest.model.predict(new), rtol=1e-12, atol=1e-12)
    assert np.isfinite(forest.predict(np.array([[np.inf, -1e300, 0.0]]))).all()


def test_it_has_128_trees_and_the_same_ones_again():
    first, second = Forest(*data(60)), Forest(*data(60))
    assert len(first.model.estimators_) == 128
    np.testing.assert_array_equal(first.predict(data(50, seed=2)[0]), second.predict(data(50, seed=2)[0]))


def hidden(rows: int = 240, noise: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Return data in which one of twelve columns determines the target, up to noise."""
    random = np.random.default_rng(5)
    x = random.normal(size=(rows, 12))
    return x, np.sign(x[:, 0]) + np.round(2 * x[:, 0]) + noise * random.normal(size=rows)


def error(x: np.ndarray, y: np.ndarray, settings: dict[str, float] | None, learned: int) -> float:
    """Return the squared error on the rows after the first `learned` ones."""
    found = Forest(x[:learned], y[:learned], 32, settings=settings).predict(x[learned:]).mean(axis=1)
    return float(((found - y[learned:]) ** 2).mean())


def test_settings_are_those_that_predict_what_was_left_out():
    assert select_settings(*hidden()) == {"max_features": 1.0, "min_samples_leaf": 1}
    assert select_settings(*hidden(noise=3.0))["min_samples_leaf"] == 3
    assert select_settings(*hidden(30)) == COARSE
    assert error(*hidden(), None, 160) < 0.7 * error(*hidden(), COARSE, 160)


def test_settings_on_samples_of_others():
    """Check the selected settings on the diabetes data of scikit-learn.

    On held-out rows, the error is at most 3 % larger than with the best candidate.
    """
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True)
    assert error(x, y, None, 300) <= 1.03 * min(error(x, y, each, 300) for each in CANDIDATES)


def test_what_it_knows():
    x = np.array([[0.0, np.nan, 5.0], [10.0, np.nan, np.nan], [4.0, np.nan, 6.0]] * 4)
    known = Forest(x, x[:, 0], trees=2)
    rows = [[0, 1, 5], [-0.9, 1, 5], [11.1, 1, 5], [np.nan, 1, 5], [5, np.nan, np.nan], [5, 7, 6.2]]
    assert known.is_familiar(np.array(rows, float)).tolist() == [True, True, False, False, True, False]
    assert known.is_familiar(np.array([[5, 7, 6.2]]), margin=0.2).tolist() == [True]


@pytest.mark.parametrize(("x", "y"), [(np.zeros((1, 3)), np.zeros(1)), (np.zeros((4, 3)), np.full(4, np.nan))])
def test_nothing_to_train_on(x, y):
    with pytest.raises(InputError, match="training needs"):
        Forest(x, y)
