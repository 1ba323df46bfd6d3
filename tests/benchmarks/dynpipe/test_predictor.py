"""Check the predictors of interference that the benchmark compares."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.papers.dynpipe.predictor import MODELS, Constant, Linear, Scaled, Trees, random_parts
from lightning_pipes.planning.replanning import NO_NEIGHBOR
from lightning_pipes.strategies.dynpipe.interference.dataset import Dataset, cross_validated
from lightning_pipes.strategies.dynpipe.interference.features import (
    FEATURE_NAMES,
    FORMULA_COLUMN,
    feature_table,
    predict_by_formula,
)
from lightning_pipes.strategies.dynpipe.interference.predictor import CorrectedFormula, Formula
from tests.strategies.dynpipe.interference.windows import BUSY, data, device, hosting


def test_trained_predictors_beat_others_and_the_formula_needs_no_data():
    (pairs, ratios), (new_pairs, truth) = data(), data(100, seed=1)
    rows, new = feature_table(pairs), feature_table(new_pairs)
    errors = {m.name: float(np.abs(m().fit(rows, ratios).predict(new) - truth).mean()) for m in MODELS}
    assert errors["formula x forest"] < errors["formula"] < errors["constant"]
    assert errors["forest"] < errors["constant"]
    assert errors["linear"] < errors["constant"]
    assert errors["network"] < errors["constant"]
    assert set(errors) == {
        "forest",
        "formula x forest",
        "formula",
        "formula x constant",
        "linear",
        "network",
        "constant",
    }
    assert Formula().predict(new[:1])[0] == pytest.approx(predict_by_formula(new_pairs[0][0]))


def test_forest_alone_is_used_without_counters_of_the_scheduler():
    pairs, ratios = data()
    blind = [({BUSY: seen[BUSY]}, stage) for seen, stage in pairs]
    rows = feature_table(blind)
    alone = CorrectedFormula().fit(rows, ratios).predict(rows)
    np.testing.assert_allclose(alone, Trees().fit(rows, ratios).predict(rows))


def test_a_line_does_not_lead_out_of_the_world():
    pairs, ratios = data()
    far = feature_table([(device(1e-3, 1.0, 1e6), hosting())])
    assert Linear().fit(feature_table(pairs), ratios).predict(far)[0] == pytest.approx(ratios.max())
    assert Constant().fit(feature_table(pairs), ratios).predict(far)[0] == ratios.mean()


def test_constants_and_factors_are_learned() -> None:
    """Check models on windows whose ratio is 1.5 times the formula, with kinds of neighbours held out."""
    rows = np.random.default_rng(0).uniform(1, 3, size=(18, len(FEATURE_NAMES)))
    neighbours = np.array(["spin"] * 6 + ["memory"] * 6 + [NO_NEIGHBOR] * 6)
    stages, settings = np.array(["a", "b", "c"] * 6), np.repeat([0, 1, 2], 6)
    windows = Dataset(rows, 1.5 * rows[:, FORMULA_COLUMN], neighbours, stages, settings)
    assert cross_validated(Scaled, windows.without_each(neighbours))[0].r2 == pytest.approx(1.0)
    assert cross_validated(Constant, random_parts(windows))[0].r2 < 0.1
