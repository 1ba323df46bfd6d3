"""Check that records of runs are restored from their folders."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from lightning_pipes.cost import CostModel, Link
from lightning_pipes.ir import F, Kind, Plan, PlanError, Span
from lightning_pipes.sim import simulate
from lightning_pipes.sim.records.record import (
    RUN_FILE,
    RunRecord,
    costs_data,
    costs_of,
    plan_data,
    plan_of,
    read_json,
    timeline_data,
    timeline_of,
)
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.strategies.interleaved import Interleaved
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.testing.generators import random_costs, random_plan, record_of, tiny_plan, uniform


@pytest.mark.parametrize("known", [False, True])
def test_records_come_back(known, tmp_path):
    record = record_of([1, 2, 3, 4, 5, 6, 7, 8], 2, 6, "interleaved", stages_per_rank=3, known=known)
    record.save(tmp_path / RUN_FILE)
    again = RunRecord.load(tmp_path)
    assert again == record
    assert (again.settings, again.costs.seconds, again.facts) == (record.settings, record.costs.seconds, record.facts)
    assert RunRecord.load(tmp_path / RUN_FILE) == record
    assert again.label == "interleaved stages_per_rank=3"


def test_a_plan_alone_comes_back(tmp_path):
    record = replace(record_of([1, 2], 2, 2), measured=None, replayed=None)
    record.save(tmp_path / RUN_FILE)
    assert RunRecord.load(tmp_path) == record
    assert record.displayed_timeline is record.predicted


def test_a_run_without_a_prediction_comes_back_with_the_reason(tmp_path):
    record = replace(record_of([1, 2], 2, 2), predicted=None, unpredicted="the layers were not measured")
    record.save(tmp_path / RUN_FILE)
    assert RunRecord.load(tmp_path) == record
    assert record.prediction_text == "Nothing was predicted: the layers were not measured"
    with pytest.raises(PlanError, match="a step that was measured and replayed, or one that was predicted"):
        replace(record, replayed=None)


def test_folder_without_a_run(tmp_path):
    with pytest.raises(PlanError, match=r"there is no run in .*nowhere: run.json is written when"):
        RunRecord.load(tmp_path / "nowhere")
    with pytest.raises(PlanError, match="there is no run in"):
        RunRecord.load(tmp_path)


def test_a_loaded_record_runs_on(tmp_path):
    """Check that a record keeps everything that a schedule or the simulator needs."""
    record = record_of([1, 1, 1, 1], 2, 4, "interleaved")
    record.save(tmp_path / RUN_FILE)
    again = RunRecord.load(tmp_path)
    program = Interleaved().program(again.plan)
    assert simulate(program, again.plan, again.costs).events == record.replayed.events


def test_settings_that_are_not_plain_values_are_named(tmp_path):
    """Check that a record accepts any settings, because a custom schedule may have settings of any type."""
    record = replace(record_of([1, 1], 2, 2), schedule="mine", settings={"order": (1, (2,)), "k": 2, "by": {3}})
    record.save(tmp_path / RUN_FILE)
    assert RunRecord.load(tmp_path).settings == {"order": (1, (2,)), "k": 2, "by": "{3}"}


def through_json(data):
    return json.loads(json.dumps(data))


@pytest.mark.parametrize("seed", range(8))
def test_plans_come_back(seed):
    plan = random_plan(seed)
    orders = GPipe().program(replace(plan))
    first, *others = orders.head[0]
    plan = replace(
        plan, after=dict.fromkeys(others, (first,)), versions=(2,) * plan.n_stages, limits=(5,) * plan.n_stages
    )
    again = plan_of(through_json(plan_data(plan)))
    assert again == plan
    assert again.after == plan.after
    assert again.spans(Kind.F, 0)[0].rows == plan.spans(Kind.F, 0)[0].rows  # spans, not only pairs


def test_layers_come_back_as_spans():
    plan = Plan.even(2, 3, layers=[Span(0, 4), Span(4, 5)], recompute=[True, False])
    again = plan_of(through_json(plan_data(plan)))
    assert again == plan
    assert again.layers[0].rows == 4


def test_spans_are_listed_once():
    small, large = (len(json.dumps(plan_data(Plan.even(stages, 64)))) for stages in (2, 64))
    assert large < 3 * small


@pytest.mark.parametrize("seed", range(8))
def test_timelines_come_back(seed):
    plan = random_plan(seed)
    timeline = replace(simulate(GPipe().program(plan), plan, random_costs(plan, seed)), attributes={"a": "b"})
    again = timeline_of(json.loads(json.dumps(timeline_data(timeline))))
    assert again == timeline
    assert (again.bubble, again.link_busy, again.program()) == (timeline.bubble, timeline.link_busy, timeline.program())


def test_costs_come_back():
    plan, costs = uniform(3, 4, f=2, b=3, link=1, latency=7, activation_bytes=11)
    costs = replace(
        costs,
        links={(0, 1): Link(1e9, 1e-6, burst=1e6, peak=2e9, max_in_flight=4, wire="card"), (1, 0): Link(math.inf)},
        forward_bytes=(1.5, 2.5),
    )
    again = costs_of(through_json(costs_data(costs)))
    assert again == costs
    assert (again.seconds, again.links) == (costs.seconds, costs.links)
    order = OneFOneB().program(plan)
    assert simulate(order, plan, again).events == simulate(order, plan, costs).events


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "can't be read"),
        ("[1]", r"holds \[1\], and should hold an object"),
        ('{"format": 2}', "it has no 'timeline'"),
        ('{"format": 1, "timeline": {}}', "has format 1, this version reads 2; run again"),
    ],
)
def test_other_files_are_refused(text, said, tmp_path):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(PlanError, match=said):
        timeline_of(read_json(tmp_path / "x.json", "timeline")["timeline"])


def test_regime_single_operations_and_scatter():
    plan = tiny_plan(2, 2)
    costs = CostModel.uniform(2, 1e-3, 2e-3, message_bytes=9, link=Link(1e4, blocking=True), regime="shared")
    costs = replace(costs, each={F(1, plan.spans(Kind.F, 1)[0]): 0.25}, scatter={(Kind.B, 0): (1.0, 1.5)})
    assert costs_of(json.loads(json.dumps(costs_data(costs)))) == costs
    timeline = simulate(GPipe().program(plan), plan, costs)
    assert timeline_of(json.loads(json.dumps(timeline_data(timeline)))) == timeline
    older = costs_data(CostModel.uniform(2, 1e-3, 2e-3))
    for name in ("regime", "each", "scatter"):
        del older[name]
    assert costs_of(json.loads(json.dumps(older))) == CostModel.uniform(2, 1e-3, 2e-3)
