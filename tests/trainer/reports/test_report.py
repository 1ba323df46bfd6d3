"""Tests of the report of a run, compared with the prediction of the simulator."""

from __future__ import annotations

import csv
import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_pipes import JobArray, PipelineStrategy, TimelineLogger
from lightning_pipes.cost import CostModel, Link
from lightning_pipes.cost.units import bytes_text, seconds_text
from lightning_pipes.ir import B, F, Kind, Plan, Program, Span
from lightning_pipes.sim import draw_spread, simulate
from lightning_pipes.sim.records.record import RunRecord
from lightning_pipes.sim.timeline import Event
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.reports.report import (
    SIBLINGS_LABEL,
    PipelineReport,
    PredictedStep,
    RunInfo,
    Window,
    find_typical_step,
)
from tests.trainer.lit import Lit
from tests.trainer.reports.runs import fit


class Slow(nn.Linear):
    """A layer that sleeps in its forward, in place of a real computation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return super().forward(x)


class LitSlow(Lit):
    def __init__(self) -> None:
        super().__init__(layers=1)
        self.model = nn.Sequential(Slow(6, 6), Slow(6, 3))


class LitUneven(Lit):
    """A module whose three layers have known sizes in bytes."""

    def __init__(self) -> None:
        super().__init__(layers=1, optimizer="adamw")
        self.model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def measured(rank: int, folder: str) -> dict[str, Any]:
    """Train twice, and return the values of both reports."""
    strategy = PipelineStrategy("gpipe", microbatches=4)
    fit(LitSlow(), strategy, 2)
    report = strategy.report
    saved = report.save(Path(folder) / str(rank))
    loaded = RunRecord.load(saved.record)
    assert "makespan" in str(report)
    uneven = PipelineStrategy("1f1b", microbatches=2, partition=[1])
    with told() as lines:
        fit(LitUneven(), uneven, 2)
    return {
        "numbers": [report.bubble_measured, report.bubble_replayed, report.measured.makespan, report.replayed.makespan],
        "predicted": (report.predicted, report.bubble_predicted, strategy.decision.computing, report.prediction_text),
        "unpredicted": (
            uneven.report.predicted,
            uneven.report.bubble_predicted,
            uneven.report.prediction_text,
            uneven.report.prediction_text in str(uneven.report),
        ),
        "loaded": loaded == report.record and loaded.measured.events == report.measured.events,
        "label": report.record.label,
        "facts": report.record.facts,
        "between": report.record.between,
        "advice": report.advice.sentence,
        "costs": uneven.report.record.costs,
        "peaks": uneven.report.record.peaks,
        "memory": [uneven.report.record.memory_text, str(uneven.report).splitlines()[-1]],
        "told": [line for line in lines if "Estimated peak memory" in line],
    }


@contextmanager
def told() -> Iterator[list[str]]:
    """Yield the lines that Lightning's rank-zero logger writes in the block."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict[str, Any]]:
    return run_ranks(measured, 2, str(folder), timeout=90)


def test_report(ranks, folder):
    first, second = (rank["numbers"] for rank in ranks)
    assert first == second
    bubble, replayed, makespan, expected = first
    assert 0 < bubble < 1  # one rank waits for the first forward of the other rank
    assert 0 < replayed < 1
    assert min(expected, makespan) > 5 * 10_000_000  # four micro-batches of 10 ms pass through both layers
    assert (folder / "0" / "timeline.png").stat().st_size > 1000
    assert json.loads((folder / "0" / "timeline.json").read_text())
    assert ranks[0]["loaded"]
    assert ranks[0]["label"] == "gpipe"
    assert ranks[0]["facts"]["module"] == "LitSlow"
    assert ranks[0]["between"] > 0
    page = (folder / "0" / "report.html").read_text()
    assert escape(ranks[0]["advice"]) in page


def test_what_was_predicted_is_what_the_cut_was_chosen_by(ranks):
    timeline, bubble, computing, text = ranks[0]["predicted"]
    assert timeline.makespan / 1e9 == pytest.approx(computing, rel=1e-6)
    assert bubble == timeline.mean_bubble
    assert text.startswith("Predicted before it ran: ")
    nothing, none, reason, is_told = ranks[0]["unpredicted"]  # partition=[1] is given, so no layer was measured
    assert nothing is none is None
    assert reason == "Nothing was predicted: the layers were not measured before training"
    assert is_told


def test_bytes_of_stages(ranks):
    """Check the bytes of both stages against values computed by hand, in float64.

    The stages have 6 x 10 + 10 and 10 x 3 + 3 parameters. AdamW stores two numbers per parameter, and a step for each
    tensor.
    """
    costs: CostModel = ranks[0]["costs"]
    assert costs.weight_bytes == (8 * 70, 8 * 33)
    assert costs.state_bytes == (8 * 70 * 3 + 2 * 4, 8 * 33 * 3 + 2 * 4)
    assert costs.forward_bytes == costs.backward_bytes == (8 * 10,)
    # Stage 0 keeps nothing, because its input is in the batch, and its result is on stage 1. Stage 1 keeps its input
    # (10), because tanh needs its result (10), and the scores of the last layer (3), of which the loss keeps the
    # probabilities (3).
    assert costs.activation_bytes[0] == 0
    assert 8 * (10 + 3) <= costs.activation_bytes[1] <= 8 * (10 + 10 + 3 * 4)


def test_peak_of_each_rank_is_reported(ranks):
    """Check the reported peak memory of each rank, of one process, and of DDP.

    1F1B holds both micro-batches of four samples on the first rank, and one on the second. In one process, both stages
    hold all eight samples. Each of two DDP processes holds four samples, and gradients twice.
    """
    costs, (record, text) = ranks[0]["costs"], ranks[0]["memory"]
    held = [w + s for w, s in zip(costs.weight_bytes, costs.state_bytes, strict=True)]
    alone = sum(held) + 8 * sum(costs.activation_bytes)
    ddp = sum(held) + sum(costs.weight_bytes) + 4 * sum(costs.activation_bytes)
    first, second = held[0] + 8 * costs.activation_bytes[0], held[1] + 4 * costs.activation_bytes[1]
    assert record == text
    assert f"{bytes_text(alone)} for one process, and {bytes_text(ddp)} for each process of DDP" in text
    assert all(size is None or 0 < size < 2**33 for size in ranks[0]["peaks"])
    assert ("Resident memory" in text) == any(size is not None for size in ranks[0]["peaks"])
    assert len(ranks[0]["told"]) == 1
    estimated = f"Estimated peak memory of tensors: {bytes_text(first)} on rank 0, {bytes_text(second)} on rank 1."
    assert ranks[0]["told"][0].startswith(estimated)
    assert ranks[0]["told"][0] == text
    assert not ranks[1]["told"]


def among_siblings(rank: int, folder: str) -> dict[str, Any]:
    """Return the reports of one of four siblings of an array, and of a job that is alone in its array."""
    array = JobArray[Any](4)
    strategies = [PipelineStrategy("gpipe", microbatches=2) for _ in range(5)]
    logger = CSVLogger(folder, name="csv", version="")
    more: list[dict[str, Any]] = [{"logger": logger, "callbacks": [TimelineLogger(2)]}, {}, {}, {}]
    jobs = [partial(fit, LitSlow(), s, 2, **options) for s, options in zip(strategies, more, strict=False)]
    assert not any(outcome.error for outcome in array.run(jobs))
    (outcome,) = JobArray(1).run([partial(fit, LitSlow(), strategies[-1], 2)])
    assert not outcome.error
    assert array.timeline is not None
    report, alone = strategies[0].report, strategies[-1].report
    saved = report.save(Path(folder) / str(rank))
    return {
        "told": [report.bubble_measured, report.bubble_replayed, report.bubble_predicted, report.prediction_text],
        "advice": report.advice,
        "alone": (alone.advice.now is not None, alone.record.siblings, alone.record.sibling_note, alone.record.between),
        "text": str(report),
        "loaded": RunRecord.load(saved.record) == report.record,
    }


def test_a_sibling_does_not_take_time_for_others_for_idle_time(tmp_path):
    """Check that a sibling's report does not count the time of other siblings as idle.

    Four siblings keep the ranks busy, but the timeline of each sibling would leave them idle.
    """
    for rank in run_ranks(among_siblings, 2, str(tmp_path), timeout=90):
        assert rank["told"] == [None, None, None, ""]
        advice = rank["advice"]
        assert (advice.now, advice.proposed, advice.changes, advice.notes) == (None, None, (), ())
        assert "idle " not in advice.sentence.replace("how much they idled", "")
        assert advice.sentence.endswith("JobArray.timeline has the bubble of all siblings.")
        assert "up to 4 siblings at a time" in rank["text"]
        assert "makespan" not in rank["text"]
        assert rank["loaded"]
        is_advised, siblings, shared, between = rank["alone"]
        assert (is_advised, siblings, shared) == (True, 1, "")
        assert between is not None
    page = (tmp_path / "0" / "report.html").read_text()
    assert "in which ranks idle" not in page
    assert SIBLINGS_LABEL in page
    assert "4 siblings at a time" in page
    with open(tmp_path / "csv" / "metrics.csv") as file:
        names = {name for name in next(csv.reader(file)) if name.startswith("pipeline/")}
    assert names == {"pipeline/step_ms", "pipeline/slowest_stage", "pipeline/slowest_ratio"}


def test_nothing_to_report():
    from lightning_pipes.ir import PlanError
    from lightning_pipes.trainer import PipelineReport

    empty: list[Any] = [[], []]
    with pytest.raises(PlanError, match="no batch was trained"):
        PipelineReport.from_windows(empty)


@pytest.mark.parametrize(
    ("measured", "said"), [(2.0, "1 s predicted, 2 s measured, and 4 s in the last steps"), (4.1, "4.1 s measured")]
)
def test_whether_a_choice_came_true(measured, said):
    """Check the sentence about the predicted and the measured time of a step.

    The first steps show whether the choice was right. The last steps are named if their time differs.
    """
    plan = Plan.even(1, 1)
    events = [Event(0, F(0, Span(0, 1)), 0, 10**9), Event(0, B(0, Span(0, 1)), 10**9, 4 * 10**9)]
    window = Window(plan, GPipe().program(plan), events)
    told = simulate(GPipe().program(plan), plan, CostModel.uniform(1, 0.25, 0.75))
    about = RunInfo(choice="cut at [3]", predicted=PredictedStep(told, window.order), measured=measured)
    assert str(PipelineReport.from_windows([[window]], about).record.choice).endswith(said)


def windows_of(program: Program, plan: Plan, each: Sequence[CostModel]) -> list[list[Window]]:
    """Return the windows of all ranks, with one step for each of the given costs."""
    ran = [simulate(program, plan, costs) for costs in each]
    return [
        [Window(plan, program, [e for e in step.events if e.rank == rank]) for step in ran]
        for rank in range(plan.n_ranks)
    ]


def test_a_wrong_profile_predicts_wrongly_and_a_replay_does_not():
    """Check that a replay predicts the measured step, and that a wrong profile does not.

    The profile has half of the measured times and another bubble.
    """
    plan = Plan.even(2, 4)
    program = GPipe().program(plan)
    told = simulate(program, plan, CostModel.uniform(2, 1e-3, 1e-3))
    windows = windows_of(program, plan, [CostModel.uniform(2, 2e-3, 4e-3, message_bytes=10, link=Link(2e3))] * 3)
    report = PipelineReport.from_windows(windows, RunInfo(predicted=PredictedStep(told, program)))
    assert report.predicted.makespan == told.makespan == 10_000_000
    assert report.measured.makespan == report.replayed.makespan > 35_000_000
    assert report.bubble_predicted == pytest.approx(0.2)  # 8 of 10 ms are busy on each rank
    assert report.bubble_replayed == report.bubble_measured > 0.3
    assert report.prediction_text.startswith("Predicted before it ran: 10 ms (-81%)")
    text = str(report)
    assert "makespan 10 ms predicted, " in text
    assert f"makespan {seconds_text(report.measured.makespan)} replayed, " in text


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ({}, "the times of layers were not known before training"),
        ({"unpredicted": "the cut was given"}, "the cut was given"),
        ({"predicted": 4}, "the schedule, the cut or the batch size changed after the prediction"),
        ({"predicted": 2, "steps": 0}, "the prediction was corrected after the last step that is shown"),
    ],
)
def test_without_a_prediction_there_is_a_reason_and_no_number(about, reason):
    plan = Plan.even(2, 2)
    program = GPipe().program(plan)
    costs = CostModel.uniform(2, 1e-3, 2e-3)
    if "predicted" in about:
        other = Plan.even(2, about["predicted"])
        order = GPipe().program(other)
        about = {**about, "predicted": PredictedStep(simulate(order, other, costs), order)}
    report = PipelineReport.from_windows(windows_of(program, plan, [costs] * 2), RunInfo(**about))
    assert (report.predicted, report.bubble_predicted) == (None, None)
    assert report.prediction_text == f"Nothing was predicted: {reason}"


def test_only_steps_after_the_prediction_are_compared_with_it():
    """Check that steps before the prediction are not compared with it.

    The first three steps are slower. The prediction was corrected after the first steps.
    """
    plan = Plan.even(2, 2)
    program = GPipe().program(plan)
    slow, fast = CostModel.uniform(2, 5e-3, 5e-3), CostModel.uniform(2, 1e-3, 2e-3)
    told = PredictedStep(simulate(program, plan, fast), program)
    windows = windows_of(program, plan, [slow] * 3 + [fast] * 2)
    report = PipelineReport.from_windows(windows, RunInfo(predicted=told, steps=2))
    assert report.measured.makespan == report.predicted.makespan


def test_the_shown_step_has_no_hiccup():
    """Check that the step shown is a typical one.

    One of the steps has a typical length, but two of its operations hang and its other operations are faster.
    """
    plan = Plan.even(2, 4)
    program = GPipe().program(plan)
    usual = [CostModel.uniform(2, t * 1e-3, 2 * t * 1e-3) for t in (0.98, 0.99, 1.0, 1.01, 1.02)]
    hangs = {F(0, plan.spans(Kind.F, 0)[1]): 4e-3}
    shortened = replace(CostModel.uniform(2, 0.8e-3, 1.6e-3), each=hangs)
    steps = [simulate(program, plan, costs) for costs in usual]
    odd = simulate(program, plan, shortened)
    assert steps[0].makespan < odd.makespan < steps[-1].makespan
    assert find_typical_step([steps[0], steps[4], odd, steps[2], steps[1], steps[3]]) == 3


def test_a_replay_has_the_times_of_each_operation():
    """Check that a replay uses the durations of each operation.

    One forward in eight is slow, each time another one. Median durations do not show it, but the pipeline waits for it.
    """
    plan = Plan.even(2, 8)
    program, windows = GPipe().program(plan), [[], []]
    for batch in range(5):
        late = {F(0, plan.spans(Kind.F, 0)[batch + 1]): 0.1}
        ran = simulate(program, plan, replace(CostModel.uniform(2, 1e-3, 2e-3), each=late))
        for rank in range(2):
            windows[rank].append(Window(plan, program, [e for e in ran.events if e.rank == rank]))
    report = PipelineReport.from_windows(windows)
    assert report.replayed.makespan == report.measured.makespan > 100_000_000
    assert report.bubble_replayed == report.bubble_measured
    assert simulate(program, plan, report.record.costs).makespan < 40_000_000
    scattered = draw_spread(program, plan, report.record.costs)
    assert scattered.steady < 40_000_000 < 60_000_000 < scattered.mean


def test_what_ranks_do_between_two_tasks_is_replayed_where_it_is_rare_too():
    """Check that a replay includes rare pauses between two tasks.

    One rank does something else before one forward, so the median time before a task is zero.
    """
    plan = Plan.even(2, 8)
    program = GPipe().program(plan)
    spans = plan.spans(Kind.F, 0)
    ran = simulate(program, plan, replace(CostModel.uniform(2, 1e-3, 2e-3), each={F(0, spans[1]): 21e-3}))
    events = [e._replace(start=e.end - 1_000_000) if e.instruction == F(0, spans[1]) else e for e in ran.events]
    report = PipelineReport.from_windows(
        [[Window(plan, program, [e for e in events if e.rank == r])] for r in range(2)]
    )
    assert report.record.costs.overhead == 0
    without = 1 - 24 / 27  # each rank is busy for eight of nine forwards and eight of nine backwards in a row
    assert without + 0.2 < report.bubble_replayed <= report.bubble_measured


def test_it_says_in_which_world_it_predicts():
    """Check that the report names the kind of links that its replay assumes."""
    plan = Plan.even(2, 2)
    program = GPipe().program(plan)
    ran = simulate(program, plan, CostModel.uniform(2, 1e-3, 2e-3, message_bytes=10, link=Link(1e4)))
    report = PipelineReport.from_windows(
        [[Window(plan, program, [e for e in ran.events if e.rank == r])] for r in range(2)]
    )
    assert "replayed with asynchronous links" in str(report)
