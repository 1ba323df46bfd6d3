import re

import numpy as np
import pytest

from lightning_pipes.ir import InputError, adapt_plan
from lightning_pipes.ir.registry import make_schedule
from lightning_pipes.planning.planner import planner_of
from lightning_pipes.strategies.dynpipe import DynPipe, DynPlanner
from lightning_pipes.strategies.dynpipe.interference import Predictor
from lightning_pipes.strategies.dynpipe.interference.dataset import Dataset
from lightning_pipes.strategies.dynpipe.interference.features import FEATURE_NAMES
from lightning_pipes.strategies.pipedream import PipeDream
from lightning_pipes.testing.conformance import ScheduleConformance
from lightning_pipes.testing.generators import tiny_plan


class TestDynPipe(ScheduleConformance):
    schedules = [DynPipe()]
    refused = [lambda: DynPipe().program(tiny_plan(4, 4, ranks=(0, 1, 0, 1)))]

    def most_held(self, schedule, plan, stage):
        return plan.n_stages - stage


@pytest.mark.parametrize(("p", "m"), [(2, 1), (4, 1), (4, 4)])
def test_order_and_versions_equal_pipedream(p, m):
    plan = tiny_plan(p, m)
    dynpipe, pipedream = adapt_plan(plan, DynPipe()), adapt_plan(plan, PipeDream())
    assert dynpipe.versions == pipedream.versions
    assert DynPipe().program(dynpipe) == PipeDream().program(pipedream)


def test_settings_reach_the_planner():
    made = planner_of(make_schedule("dynpipe", every=50, windows=3, gain=0.1, horizon=7, top_k=5, incremental=True))
    assert isinstance(made, DynPlanner)
    assert (made.every, made.windows, made.gain, made.horizon) == (50, 3, 0.1, 7)
    assert (made.search.top_k, made.search.incremental, made.predictor) == (5, True, None)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"every": 0}, "every"),
        ({"windows": -1}, "windows"),
        ({"gain": 1.0}, "a share of a step"),
        ({"horizon": 2.5}, "horizon"),
        ({"top_k": 0}, "top_k"),
        ({"incremental": 1}, "incremental"),
        ({"predictor": 3}, "predictor"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, words):
    with pytest.raises(InputError, match=words):
        DynPipe(**settings)


def test_a_predictor_is_read_from_its_file(tmp_path):
    missing = str(tmp_path / "missing.npz")
    with pytest.raises(InputError, match=re.escape(missing)):
        DynPipe(predictor=missing).make_planner()
    known = str(tmp_path / "known.npz")
    label = np.array(["a", "b"])
    Dataset(np.ones((2, len(FEATURE_NAMES))), np.ones(2), label, label, np.arange(2)).save(known)
    planner = DynPipe(predictor=known).make_planner()
    assert isinstance(planner.predictor, Predictor)
    assert planner.predictor is DynPipe(predictor=known).make_planner().predictor  # trained once
