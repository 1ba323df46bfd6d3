"""Check the predictions of interference that planners use."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import pytest

from lightning_pipes.ir import InputError
from lightning_pipes.planning.replanning import HostedStage, Interference
from lightning_pipes.strategies.dynpipe.interference import Predictor
from lightning_pipes.strategies.dynpipe.interference.features import (
    FEATURE_NAMES,
    RUN_SHARE_METRIC,
    WAIT_SHARE_METRIC,
    feature_table,
    predict_by_formula,
)
from lightning_pipes.strategies.dynpipe.interference.predictor import CorrectedFormula
from tests.cases import count_calls
from tests.strategies.dynpipe.interference.windows import data, device, hosting


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    pairs, ratios = data()
    return Predictor(CorrectedFormula().fit(feature_table(pairs), ratios).forest)


def test_a_row():
    (row,) = feature_table([(device(0.25, 0.5), hosting(0.001, 3e6))])
    found = dict(zip(FEATURE_NAMES, row, strict=True))
    assert found["formula.ratio"] == 3.0
    assert found["stage.backward_share"] == pytest.approx(2 / 3)
    assert found["stage.weight_bytes_per_s"] == pytest.approx(1e9)
    assert math.isnan(found["gpu.sm_active_share"])


@pytest.mark.parametrize(
    ("seen", "ratio"),
    [
        ({}, math.nan),
        ({RUN_SHARE_METRIC: 0.0, WAIT_SHARE_METRIC: 0.5}, math.nan),
        ({RUN_SHARE_METRIC: 0.5, WAIT_SHARE_METRIC: 0.25}, 1.5),
        ({RUN_SHARE_METRIC: 1e-9, WAIT_SHARE_METRIC: 1.0}, 1000),
    ],
)
def test_the_plain_formula(seen, ratio):
    assert predict_by_formula(seen) == pytest.approx(ratio, nan_ok=True)


def test_stages_that_suffer_more_do_so_in_its_answer(predictor):
    assert isinstance(predictor, Interference)
    here = device(0.5, 0.5, 0.9)
    found = predictor.predict([(here, hosting(0.002, 1e5)), (here, hosting(0.002, 1e8)), (here, hosting(0.002, 1e8))])
    assert found.ratios[0] == pytest.approx(2.0, rel=0.1)
    assert found.ratios[1] == found.ratios[2] == pytest.approx(3.8, rel=0.1)
    assert found.known.all()


def test_it_does_not_know(predictor):
    rows = [
        (device(), hosting()),
        (device(busy=3.0), hosting()),  # busier than any training row
        ({RUN_SHARE_METRIC: 0.5, WAIT_SHARE_METRIC: 0.5}, hosting()),  # a source that was always present is missing
        ({**device(), "gpu.sm_active_share": 0.5}, hosting()),  # a source that was never present is ignored
        (device(), hosting(weights=1e12)),  # a stage unlike all others
        ({}, HostedStage(*(8 * [0.0]))),
    ]
    assert predictor.predict(rows).known.tolist() == [True, False, False, True, False, False]
    unsure = [(device(wait=wait / 100), hosting()) for wait in range(100)]
    # the trees do not agree on all of them
    assert not Predictor(predictor.forest, spread=0.0).predict(unsure).known.all()
    assert Predictor(predictor.forest).predict(unsure).known.all()
    nothing = predictor.predict([])
    assert (len(nothing.ratios), len(nothing.known)) == (0, 0)


def test_bad_margins(predictor):
    with pytest.raises(InputError, match="spread must be 0 or more, got -1"):
        Predictor(predictor.forest, spread=-1)


def test_a_whole_re_plan_is_asked_at_once(predictor):
    """Check that the predictions of a whole replan need few Python calls for each row.

    The rows are those of all 6435 partitions of 16 blocks on 8 devices, which DynPipe predicts one by one.
    """
    devices = [device(wait=n / 8) for n in range(8)]
    rows = [
        (devices[place], hosting(0.0005 * (stop - start), 1e5 * (stop - start)))
        for cut in combinations(range(1, 16), 7)
        for place, (start, stop) in enumerate(pairwise((0, *cut, 16)))
    ]
    assert len(rows) == 6435 * 8
    found = []
    calls = count_calls(lambda: found.append(predictor.predict(rows)))
    assert len(found[0].ratios) == len(rows)
    assert calls < 6 * len(rows), calls
    assert len(predictor.forest.model.estimators_) == 128
