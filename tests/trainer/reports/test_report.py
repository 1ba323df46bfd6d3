"""What a run did, against what the simulator predicts."""

from __future__ import annotations

import csv
import json
import logging
import time
from collections.abc import Iterator
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
from lightning_pipes.cost.units import bytes_text
from lightning_pipes.ir import B, F, Kind, Plan, Span
from lightning_pipes.sim import draw_spread, simulate
from lightning_pipes.sim.shown.record import RunRecord
from lightning_pipes.sim.timeline import Event
from lightning_pipes.strategies.gpipe import GPipe
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.reports.report import AMONG_SIBLINGS, PipelineReport, RunInfo, Window
from tests.trainer.lit import Lit
from tests.trainer.reports.runs import fit


class Slow(nn.Linear):
    """An emulated layer: it sleeps for its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return super().forward(x)


class LitSlow(Lit):
    def __init__(self) -> None:
        super().__init__(layers=1)
        self.model = nn.Sequential(Slow(6, 6), Slow(6, 3))


class LitUneven(Lit):
    """Three layers of known bytes."""

    def __init__(self) -> None:
        super().__init__(layers=1, optimizer="adamw")
        self.model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def measured(rank: int, folder: str) -> dict[str, Any]:
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
        "numbers": [
            report.bubble_measured,
            report.bubble_predicted,
            report.measured.makespan,
            report.predicted.makespan,
        ],
        "loaded": loaded == report.record and loaded.measured.events == report.measured.events,
        "label": report.record.label,
        "facts": report.record.facts,
        "between": report.record.between,
        "advice": report.advice.sentence,
        "costs": uneven.report.record.costs,
        "peaks": uneven.report.record.peaks,
        "memory": [uneven.report.record.memory_text, str(uneven.report).splitlines()[-1]],
        "told": [line for line in lines if "Peak memory" in line],
    }


@contextmanager
def told() -> Iterator[list[str]]:
    """The lines of Lightning's log in the block."""
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
    bubble, predicted, makespan, expected = first
    assert 0 < bubble < 1  # one of the ranks waits for the other's first forward
    assert 0 < predicted < 1
    assert min(expected, makespan) > 5 * 10_000_000  # four micro-batches of 10 ms pass both layers
    assert (folder / "0" / "timeline.png").stat().st_size > 1000
    assert json.loads((folder / "0" / "timeline.json").read_text())
    assert ranks[0]["loaded"]
    assert ranks[0]["label"] == "gpipe"
    assert ranks[0]["facts"]["module"] == "LitSlow"
    assert ranks[0]["between"] > 0
    page = (folder / "0" / "report.html").read_text()
    assert escape(ranks[0]["advice"]) in page


def test_bytes_of_stages(ranks):
    """By hand, in float64: 6 x 10 + 10 parameters, then 10 x 3 + 3; AdamW keeps two numbers and a step for each."""
    costs: CostModel = ranks[0]["costs"]
    assert costs.weight_bytes == (8 * 70, 8 * 33)
    assert costs.state_bytes == (8 * 70 * 3 + 2 * 4, 8 * 33 * 3 + 2 * 4)
    assert costs.forward_bytes == costs.backward_bytes == (8 * 10,)
    # Stage 0 keeps nothing: its input lies in the batch, and its result with stage 1. That keeps what came in (10), as
    # tanh needs its result (10), and the last layer's scores (3), of which the loss keeps probabilities (3).
    assert costs.activation_bytes[0] == 0
    assert 8 * (10 + 3) <= costs.activation_bytes[1] <= 8 * (10 + 10 + 3 * 4)


def test_the_peak_of_each_rank_is_told(ranks):
    """1F1B holds both micro-batches of four samples on the first rank, and one on the second.

    In one process both stages hold all eight samples; each of two processes of DDP has four, and gradients twice.
    """
    costs, (record, text) = ranks[0]["costs"], ranks[0]["memory"]
    held = [w + s for w, s in zip(costs.weight_bytes, costs.state_bytes, strict=True)]
    alone = sum(held) + 8 * sum(costs.activation_bytes)
    ddp = sum(held) + sum(costs.weight_bytes) + 4 * sum(costs.activation_bytes)
    first, second = held[0] + 8 * costs.activation_bytes[0], held[1] + 4 * costs.activation_bytes[1]
    assert record == text
    assert f"{bytes_text(alone)} in one process, {bytes_text(ddp)} in each process of DDP" in text
    assert all(size is None or 0 < size < 2**33 for size in ranks[0]["peaks"])
    assert ("measured" in text) == any(size is not None for size in ranks[0]["peaks"])
    assert len(ranks[0]["told"]) == 1
    assert f"rank 0 {bytes_text(first)} predicted" in ranks[0]["told"][0]
    assert f"rank 1 {bytes_text(second)} predicted" in ranks[0]["told"][0]
    assert ranks[0]["told"][0] == text
    assert not ranks[1]["told"]


def among_siblings(rank: int, folder: str) -> dict[str, Any]:
    """A sibling of four, and one that is alone in its array."""
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
        "bubbles": [sum(array.timeline.bubble) / 2, report.bubble_measured],
        "advice": report.advice,
        "alone": (alone.advice.now is not None, alone.record.siblings, alone.record.sibling_note, alone.record.between),
        "text": str(report),
        "loaded": RunRecord.load(saved.record) == report.record,
    }


def test_a_sibling_does_not_take_time_for_others_for_idle_time(tmp_path):
    """Four of them keep the ranks busy, as the array's timeline has it; each alone seems to leave them idle."""
    for rank in run_ranks(among_siblings, 2, str(tmp_path), timeout=90):
        busy, sibling = rank["bubbles"]
        assert sibling > busy  # by how much depends on what else runs on the machine
        advice = rank["advice"]
        assert (advice.now, advice.proposed, advice.changes, advice.notes) == (None, None, (), ())
        assert "idle " not in advice.sentence.replace("how much they idled", "")
        assert advice.sentence.endswith("the array's timeline does.")
        assert "up to 4 siblings at a time" in rank["text"]
        assert "makespan" not in rank["text"]
        assert rank["loaded"]
        is_advised, siblings, shared, between = rank["alone"]
        assert (is_advised, siblings, shared) == (True, 1, "")
        assert between is not None
    page = (tmp_path / "0" / "report.html").read_text()
    assert "time that ranks did not compute for this sibling" in page
    assert "time that ranks idle" not in page
    assert AMONG_SIBLINGS in page
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
    ("measured", "said"),
    [(2.0, "1 s predicted, 2 s measured, 4 s at last"), (4.1, "4.1 s measured")],
)
def test_whether_a_choice_came_true(measured, said):
    """The first steps show it; the last ones are named where they take another time."""
    plan = Plan.even(1, 1)
    events = [Event(0, F(0, Span(0, 1)), 0, 10**9), Event(0, B(0, Span(0, 1)), 10**9, 4 * 10**9)]
    window = Window(plan, GPipe().program(plan), events)
    about = RunInfo(choice="cut at [3]", predicted=1.0, measured=measured)
    assert str(PipelineReport.from_windows([[window]], about).record.choice).endswith(said)


def test_predicted_and_measured_are_of_one_batch_operation_by_operation():
    """One forward in eight is slow, another one each batch: medians know nothing of it, and the pipeline waits."""
    plan = Plan.even(2, 8)
    program, windows = GPipe().program(plan), [[], []]
    for batch in range(5):
        late = {F(0, plan.spans(Kind.F, 0)[batch + 1]): 0.1}
        ran = simulate(program, plan, replace(CostModel.uniform(2, 1e-3, 2e-3), each=late))
        for rank in range(2):
            windows[rank].append(Window(plan, program, [e for e in ran.events if e.rank == rank]))
    report = PipelineReport.from_windows(windows)
    assert report.predicted.makespan == report.measured.makespan > 100_000_000
    assert report.bubble_predicted == report.bubble_measured
    assert simulate(program, plan, report.record.costs).makespan < 40_000_000
    scattered = draw_spread(program, plan, report.record.costs)
    assert scattered.steady < 40_000_000 < 60_000_000 < scattered.mean


def test_what_ranks_do_between_two_tasks_is_predicted_where_it_is_rare_too():
    """A rank does something else before one forward; the median of what passes before a task is nothing."""
    plan = Plan.even(2, 8)
    program = GPipe().program(plan)
    spans = plan.spans(Kind.F, 0)
    ran = simulate(program, plan, replace(CostModel.uniform(2, 1e-3, 2e-3), each={F(0, spans[1]): 21e-3}))
    events = [e._replace(start=e.end - 1_000_000) if e.instruction == F(0, spans[1]) else e for e in ran.events]
    report = PipelineReport.from_windows(
        [[Window(plan, program, [e for e in events if e.rank == r])] for r in range(2)]
    )
    assert report.record.costs.overhead == 0
    without = 1 - 24 / 27  # of nine forwards and nine backwards in a row, eight each are a rank's own
    assert without + 0.2 < report.bubble_predicted <= report.bubble_measured


def test_it_says_in_which_world_it_predicts():
    plan = Plan.even(2, 2)
    program = GPipe().program(plan)
    ran = simulate(program, plan, CostModel.uniform(2, 1e-3, 2e-3, message_bytes=10, link=Link(1e4)))
    report = PipelineReport.from_windows(
        [[Window(plan, program, [e for e in ran.events if e.rank == r])] for r in range(2)]
    )
    assert "predicted with asynchronous links" in str(report)
