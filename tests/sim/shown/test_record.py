"""Records of runs come back from their folder."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_pipes.ir import PlanError
from lightning_pipes.sim import simulate
from lightning_pipes.sim.shown.record import FILE, RunRecord
from lightning_pipes.strategies.interleaved import Interleaved
from lightning_pipes.testing.records import record_of


@pytest.mark.parametrize("known", [False, True])
def test_records_come_back(known, tmp_path):
    record = record_of([1, 2, 3, 4, 5, 6, 7, 8], 2, 6, "interleaved", stages_per_rank=3, known=known)
    record.save(tmp_path / FILE)
    again = RunRecord.load(tmp_path)
    assert again == record
    assert (again.settings, again.costs.seconds, again.facts) == (record.settings, record.costs.seconds, record.facts)
    assert RunRecord.load(tmp_path / FILE) == record
    assert again.label == "interleaved stages_per_rank=3"


def test_a_plan_alone_comes_back(tmp_path):
    record = replace(record_of([1, 2], 2, 2), measured=None)
    record.save(tmp_path / FILE)
    assert RunRecord.load(tmp_path) == record
    assert record.displayed_timeline is record.predicted


def test_where_no_run_is(tmp_path):
    with pytest.raises(PlanError, match=r"there is no run in .*nowhere: a run leaves a directory with run.json behind"):
        RunRecord.load(tmp_path / "nowhere")
    with pytest.raises(PlanError, match="there is no run in"):
        RunRecord.load(tmp_path)


def test_a_loaded_record_runs_on(tmp_path):
    """Nothing that a schedule or the simulator needs is lost."""
    record = record_of([1, 1, 1, 1], 2, 4, "interleaved")
    record.save(tmp_path / FILE)
    again = RunRecord.load(tmp_path)
    program = Interleaved().program(again.plan)
    assert simulate(program, again.plan, again.costs).events == record.predicted.events


def test_settings_that_are_no_plain_values_are_named(tmp_path):
    """A schedule of the user's own may have any; a report must not fail for it."""
    record = replace(record_of([1, 1], 2, 2), schedule="mine", settings={"order": (1, (2,)), "k": 2, "by": {3}})
    record.save(tmp_path / FILE)
    assert RunRecord.load(tmp_path).settings == {"order": (1, (2,)), "k": 2, "by": "{3}"}
