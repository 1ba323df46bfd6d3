"""Tests of `TimelineLogger`, which logs scalars of the pipeline to any logger."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_pipes import PipelineStrategy, TimelineLogger
from lightning_pipes.ir import COMPUTE_KINDS, B, F, Instruction, Kind, PipelineError, Span
from lightning_pipes.sim import simulate
from lightning_pipes.sim.records.compare import BottleneckRank
from lightning_pipes.sim.timeline import Event
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.testing.generators import uniform
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.reports.timing import Share, Timing
from tests.cases import count_calls
from tests.trainer.lit import Lit
from tests.trainer.reports.runs import fit
from tests.trainers import make_trainer

NAMES = {f"pipeline/{name}" for name in ("step_ms", "bubble", "efficiency", "slowest_stage", "slowest_ratio")}


def timing(timeline) -> Timing:
    by_rank = [[e for e in timeline.events if e.rank == rank] for rank in range(timeline.plan.n_ranks)]
    return Timing.from_shares([Share.from_events(events) for events in by_rank])


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_it_agrees_with_the_timeline(slow):
    plan, costs = uniform(3, 6, f=2, b=4, link=1)
    slower = {k: tuple((r, 1.5 * t) for r, t in v) if k[1] == slow else v for k, v in costs.seconds.items()}
    costs.seconds.update(slower)
    timeline = simulate(OneFOneB().program(plan), plan, costs)
    found = timing(timeline)
    assert found.seconds == timeline.makespan / 1e9
    assert found.bubble == pytest.approx(sum(timeline.bubble) / 3)
    assert found.efficiency == pytest.approx(timeline.efficiency)
    assert (found.slowest, found.ratio) == (slow, pytest.approx(BottleneckRank.from_timeline(timeline).ratio))
    assert set(found.metrics) == NAMES


def test_clocks_of_ranks_are_not_compared():
    span = Span(0, 1)
    early = [Event(0, F(0, span), 0, 10), Event(0, B(0, span), 40, 60)]
    late = [Event(1, F(1, span), 9_000_010, 9_000_020), Event(1, B(1, span), 9_000_020, 9_000_040)]
    found = Timing.from_shares([Share.from_events(early), Share.from_events(late)])
    assert (found.seconds, found.bubble) == (60e-9, pytest.approx(0.5))


def test_batches_of_a_window_share_its_time():
    span = Span(0, 1)
    events = [Event(0, F(0, span, batch=n), 10 * n, 10 * n + 5) for n in range(4)]
    assert Timing.from_shares([Share.from_events(events)]).seconds == pytest.approx(35e-9 / 4)


def test_steps_belong_to_no_stage_and_are_work_as_on_a_timeline():
    assert Share.from_events([Event(0, Instruction(Kind.STEP, 0), 5, 9)]) == (4, {}, 1, 4)
    plan, costs = uniform(2, 3, f=2, b=4, step=5, link=1)
    timeline = simulate(OneFOneB().program(plan), plan, costs)
    assert timing(timeline).bubble == pytest.approx(timeline.mean_bubble)
    assert timing(timeline).efficiency == pytest.approx(timeline.efficiency)


def test_nothing_is_nothing():
    """Check that the bubble is 1 if a rank has no events."""
    assert Timing.from_shares([Share.from_events([])]).metrics["pipeline/bubble"] == 1.0


class Stopwatch(TimelineLogger):
    """Measures the cost of logging and the duration of each logged step."""

    def __init__(self, every_n_steps: int) -> None:
        super().__init__(every_n_steps)
        self.calls: list[int] = []
        """Number of function calls to log each of the logged steps."""
        self.took: list[float] = []
        """Milliseconds of this rank in the logged steps."""

    def on_train_batch_end(self, *args: Any) -> None:
        calls = count_calls(partial(super().on_train_batch_end, *args))
        if self._logged == args[0].global_step:
            self.calls.append(calls)
            events = [e for e in args[0].strategy.current_run.windows[-1].events if e.instruction.kind in COMPUTE_KINDS]
            self.took.append((max(e.end for e in events) - min(e.start for e in events)) / 1e6)


def logged(rank: int, folder: str) -> dict[str, Any]:
    loggers = [CSVLogger(folder, name="csv", version=""), TensorBoardLogger(folder, name="board", version="")]
    strategy = PipelineStrategy("1f1b", microbatches=4)
    watch = Stopwatch(2)
    fit(Lit(), strategy, 2, logger=loggers, callbacks=[watch], max_epochs=3, log_every_n_steps=1)
    accumulating = CSVLogger(folder, name="accumulating", version="")
    fit(Lit(), PipelineStrategy(), 2, logger=accumulating, callbacks=[TimelineLogger(1)], accumulate_grad_batches=3)
    return {"calls": watch.calls, "took": watch.took}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict[str, Any]]:
    return run_ranks(logged, 2, str(folder), timeout=90)


def rows(path: Path) -> list[dict[str, float]]:
    with open(path) as file:
        found = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    return [row for row in found if "pipeline/bubble" in row]


def test_csv(ranks, folder):
    found = rows(folder / "csv" / "metrics.csv")
    assert [row["step"] for row in found] == [2, 4, 6, 8]  # nine steps were made
    for row, *took in zip(found, *(rank["took"] for rank in ranks), strict=True):
        assert set(row) >= NAMES
        assert row["pipeline/step_ms"] == pytest.approx(max(took))
        assert 0 <= row["pipeline/bubble"] < 1
        assert 0 < row["pipeline/efficiency"] <= 1
        assert row["pipeline/slowest_stage"] in (0, 1)
        assert row["pipeline/slowest_ratio"] >= 1


def test_tensorboard(ranks, folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "board"))
    board.Reload()
    assert set(board.Tags()["scalars"]) >= NAMES
    assert [each.step for each in board.Scalars("pipeline/bubble")] == [2, 4, 6, 8]


def test_batches_that_only_accumulate_are_not_logged_twice(ranks, folder):
    found = rows(folder / "accumulating" / "metrics.csv")
    assert [row["step"] for row in found] == [1, 2]


def test_it_is_cheap(ranks):
    assert max(ranks[0]["calls"][1:]) < 1_500, ranks[0]["calls"]  # two small gathers, and a row in two loggers


def test_mistakes():
    """Check the errors for an invalid interval and for a strategy without a pipeline."""
    with pytest.raises(PipelineError, match="every_n_steps must be at least 1, got 0"):
        TimelineLogger(0)
    trainer = make_trainer(devices=1, callbacks=[TimelineLogger()])
    with pytest.raises(PipelineError, match=r"this trainer has SingleDeviceStrategy. Set strategy=PipelineStrategy"):
        trainer.fit(Lit())
