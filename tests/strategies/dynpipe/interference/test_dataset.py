"""Check the training data of predictors and their comparison."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from lightning_pipes.ir import InputError
from lightning_pipes.planning.replanning import NO_NEIGHBOR
from lightning_pipes.strategies.dynpipe.interference.dataset import Dataset, cross_validated, score_predictions
from lightning_pipes.strategies.dynpipe.interference.features import FEATURE_NAMES, FORMULA_COLUMN, STAGE_FEATURES
from lightning_pipes.strategies.dynpipe.interference.predictor import CorrectedFormula, Formula


@pytest.fixture
def data() -> Dataset:
    """Return two settings of three stages, each measured twice, and one setting without interference."""
    random = np.random.default_rng(0)
    stages = np.array(["a", "b", "c"] * 6)
    neighbours = np.array(["spin"] * 6 + ["memory"] * 6 + [NO_NEIGHBOR] * 6)
    rows = random.uniform(1, 3, size=(18, len(FEATURE_NAMES)))
    return Dataset(rows, 1.5 * rows[:, FORMULA_COLUMN], neighbours, stages, np.repeat([0, 1, 2], 6))


def test_other_stages_on_a_device_as_it_was_seen(data):
    crossed = data.cross_pairs()
    assert len(crossed) == 3 * 6 * 6
    device = len(FEATURE_NAMES) - len(STAGE_FEATURES)
    # In the first setting, the second window is the observed one and the last window is the requested one.
    place = 6 + 1 * 6 + 5
    np.testing.assert_array_equal(crossed.rows[place - 6 + 0, :device], data.rows[1, :device])
    np.testing.assert_array_equal(crossed.rows[place - 6, device:], data.rows[5, device:])
    assert crossed.ratios[place - 6] == data.ratios[5]
    assert (crossed.stages[place - 6], crossed.neighbours[place - 6], crossed.settings[place - 6]) == ("c", "spin", 0)
    assert all(len({*data.settings[[i]]}) == 1 for i in range(len(data)))


def test_whole_kinds_are_held_out(data):
    parts = {name: (learned, held) for name, learned, held in data.without_each(data.neighbours)}
    assert set(parts) == {"memory", "spin"}  # rows without interference are always used for training
    learned, held = parts["spin"]
    assert set(learned.neighbours) == {"memory", NO_NEIGHBOR}
    assert set(held.neighbours) == {"spin"}
    assert [set(held.stages) for _, _, held in data.without_each(data.stages)] == [{"a"}, {"b"}, {"c"}]
    found = [*data.without_each(data.neighbours)]
    assert all(len(learned) + len(held) == len(data) for _, learned, held in found)


def test_scores_equal_scikit_learn():
    from sklearn.metrics import mean_absolute_error, r2_score

    random = np.random.default_rng(1)
    truth, guess = random.uniform(1, 5, 50), random.uniform(1, 5, 50)
    found = score_predictions(truth, guess)
    assert found.r2 == pytest.approx(r2_score(truth, guess))
    assert found.mae == pytest.approx(mean_absolute_error(truth, guess))
    assert score_predictions(truth, truth) == (1.0, 0.0)


def test_models_are_scored_on_what_they_have_not_seen(data):
    over_all, each = cross_validated(CorrectedFormula, data.without_each(data.neighbours))
    assert over_all.r2 == pytest.approx(1.0)  # every ratio is 1.5 times the formula
    assert set(each) == {"memory", "spin"}
    held = np.concatenate([each.ratios for _, _, each in data.without_each(data.neighbours)])
    assert cross_validated(Formula, data.without_each(data.neighbours))[0].mae == pytest.approx((held / 3).mean())


def test_it_is_kept(data, tmp_path):
    data.save(tmp_path / "data.npz")
    again = Dataset.load(tmp_path / "data.npz")
    for name, values in vars(data).items():
        np.testing.assert_array_equal(getattr(again, name), values)


class Evil:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (self.path.touch, ())


def test_other_files(data, tmp_path):
    np.savez(tmp_path / "other.npz", names=np.array(["x"]))
    np.savez(tmp_path / "less.npz", names=np.array(FEATURE_NAMES), rows=data.rows)
    np.savez(
        tmp_path / "objects.npz",
        **{**vars(data), "names": np.array(FEATURE_NAMES), "stages": data.stages.astype(object)},
    )
    (tmp_path / "pickle.npz").write_bytes(pickle.dumps(Evil(tmp_path / "opened")))
    for name, message in {
        "other.npz": "the columns of",
        "less.npz": "can't be read as a dataset: .* Pass a file that `lightning-pipes interference`",
        "pickle.npz": "can't be read as a dataset",
        "objects.npz": "can't be read as a dataset",
        "none.npz": "can't be read as a dataset",
    }.items():
        with pytest.raises(InputError, match=message):
            Dataset.load(tmp_path / name)
    assert not (tmp_path / "opened").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ratios": np.zeros(18)}, "above 0 and finite"),
        ({"ratios": np.full(18, np.nan)}, "above 0 and finite"),
        ({"ratios": np.ones(3)}, "one entry of every other field for each row"),
        ({"rows": np.ones((18, 2))}, "one entry of every other field for each row"),
    ],
)
def test_no_dataset(data, changes, message):
    with pytest.raises(InputError, match=message):
        Dataset(**{**vars(data), **changes})
