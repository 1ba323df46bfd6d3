"""Check a predictor that learns during training."""

from __future__ import annotations

import logging
import sys

import numpy as np
import pytest

from lightning_pipes.ir import InputError
from lightning_pipes.planning.replanning import HostedStage, Interference
from lightning_pipes.strategies.dynpipe.interference import Predictor, RefittedPredictor, refit
from lightning_pipes.strategies.dynpipe.interference.features import NAMES, RUN, WAIT, feature_table
from lightning_pipes.strategies.dynpipe.interference.forest import train
from lightning_pipes.strategies.dynpipe.interference.predictor import CorrectedFormula
from lightning_pipes.strategies.dynpipe.interference.refit import LearningPredictor

BUSY = "host.machine_busy_share"


def rows(count: int, seed: int = 0, factor: float = 1.0):
    """Return stages that a busy machine slows down more than the formula predicts."""
    random = np.random.default_rng(seed)
    pairs, ratios = [], []
    for _ in range(count):
        run, wait, busy = random.uniform(0.2, 1), random.uniform(0, 1), random.uniform(0, 1)
        weights = random.uniform(1e5, 1e7)
        pairs.append(({RUN: run, WAIT: wait, BUSY: busy}, HostedStage(1, 8, 0.002, 0.004, weights, 2e6, 1e5, 1e4)))
        ratios.append((run + wait) / run * (1 + busy) * factor)
    return pairs, ratios


class Here:
    """Trains immediately in the same process, for tests that do not examine the separate process."""

    def __init__(self, learned, logs, trees):
        self._forest = train(learned, logs, NAMES, trees=trees)

    def result(self):
        return self._forest

    def close(self): ...


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(refit, "ForestTraining", Here)


def test_it_learns_from_what_it_is_told():
    refitted = RefittedPredictor(every=100, after=10, trees=16)
    assert isinstance(refitted, LearningPredictor)
    assert isinstance(refitted, Interference)
    pairs, ratios = rows(110)
    assert not refitted.predict(pairs).known.any()
    refitted.observe(pairs[:109], ratios[:109])
    assert (refitted.predictor, refitted.refits) == (None, 0)  # training starts at the 110th row, not after a time
    refitted.observe(pairs[109:], ratios[109:])
    assert refitted.refits == 1
    new, truth = rows(50, seed=1)
    found = refitted.predict(new)
    assert found.known.mean() > 0.8
    assert np.abs(np.log(found.ratios / truth)).mean() < 0.15
    refitted.close()


def test_every_rank_has_the_same_forest(here):
    pairs, ratios = rows(120)
    found = []
    for _ in range(2):
        refitted = RefittedPredictor(every=100, after=5, trees=8)
        refitted.observe(pairs, ratios)
        found.append(refitted.predict(pairs).ratios)
        refitted.close()
    np.testing.assert_array_equal(*found)


def test_the_better_one_on_the_newest_rows_stays(here):
    pairs, ratios = rows(400)
    good = Predictor(CorrectedFormula().fit(feature_table(pairs), np.array(ratios)).forest, spread=0.7)
    few, truth = rows(60, seed=3)
    kept = RefittedPredictor(good, every=60, after=1, trees=2)
    kept.observe(*(few + few[:1], truth + truth[:1]))
    assert (kept.predictor, kept.refits) == (good, 0)
    kept.close()
    others, elsewhere = rows(60, seed=3, factor=5.0)  # another machine, on which every prediction is wrong
    changed = RefittedPredictor(good, every=60, after=1, trees=2)
    changed.observe(others + others[:1], elsewhere + elsewhere[:1])
    assert changed.refits == 1
    assert changed.predictor is not None
    assert changed.predictor.spread == 0.7
    changed.close()


def test_rare_rows_are_kept_longest():
    refitted = RefittedPredictor(every=10_000, most=30)
    pairs, _ = rows(100)
    refitted.observe(pairs, [8.0, 8.0, *(98 * [1.1])])
    kept = sorted(ratio for kept in refitted._bins.values() for _, _, ratio in kept)
    assert kept == [*(28 * [1.1]), 8.0, 8.0]


def test_what_says_nothing_is_left_out():
    refitted = RefittedPredictor()
    pairs, _ = rows(3)
    refitted.observe(pairs, [float("nan"), 0.0, float("inf")])
    assert refitted._seen == 0


def test_a_training_that_fails_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    refitted = RefittedPredictor(every=20, after=1, trees=2)
    pairs, ratios = rows(80)
    with caplog.at_level(logging.WARNING):
        refitted.observe(pairs, ratios)
    assert [r.message for r in caplog.records] == [
        "No forest is trained any more: the process that trains it failed: it ended with 1"
    ]
    assert not refitted.predict(pairs).known.any()


def test_nothing_is_left_of_one_that_is_under_way():
    refitted = RefittedPredictor(every=20, after=100)
    refitted.observe(*rows(30))
    assert refitted._fit is not None
    process = refitted._fit.training._process
    refitted.close()
    assert process.returncode is not None


@pytest.mark.parametrize("name", ["every", "after", "most", "trees"])
def test_mistakes(name):
    with pytest.raises(InputError, match=f"RefittedPredictor: {name} must be at least 1, got 0"):
        RefittedPredictor(**{name: 0})
