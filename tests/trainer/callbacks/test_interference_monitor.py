"""Tests of `InterferenceMonitor`: its samples in loggers, in the report, and in the planner's observations."""

from __future__ import annotations

import csv
import math
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_pipes import InterferenceMonitor, PipelineStrategy
from lightning_pipes.engine.monitor import monitor as monitoring
from lightning_pipes.engine.monitor.source import Source
from lightning_pipes.ir import B, F, Instruction, Kind, PipelineError, Plan, PlanError, Span
from lightning_pipes.planning.planner import EvenPlanner, Problem
from lightning_pipes.planning.replanning import Observation
from lightning_pipes.sim.records.record import RunRecord
from lightning_pipes.sim.timeline import Event
from lightning_pipes.strategies.one_f_one_b import OneFOneB
from lightning_pipes.strategies.pipedream import PipeDream
from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.callbacks import interference_monitor
from lightning_pipes.trainer.callbacks.interference_monitor import StageTimes, stage_times
from tests.trainer.lit import Lit
from tests.trainer.reports.runs import fit
from tests.trainers import make_trainer

PREFIX = "InterferenceMonitor.on_train_batch_end/"


class Numbered(Source):
    """A source that reports the number of its rank. On rank 1 it fails after two reads."""

    name = "numbered"
    metrics = ("gpu.number_count", "gpu.missing_share")

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number, self._left = number, 2

    def open(self) -> None:
        pass

    def read(self) -> list[float]:
        self._left -= 1
        if self._number == 1 and self._left < 0:
            raise OSError("it has disappeared")
        return [float(self._number), math.nan]


SEEN: list[tuple[Observation, ...]] = []


class Looking(EvenPlanner):
    """A planner that records the observations it receives."""

    every = 4

    def replan(self, plan: Plan, problem: Problem) -> None:
        SEEN.append(problem.observations)


@dataclass(frozen=True)
class Flushed(OneFOneB):
    def make_planner(self) -> Looking:
        return Looking()


@dataclass(frozen=True)
class Streamed(PipeDream):
    def make_planner(self) -> Looking:
        return Looking()


class Slowly(pl.Callback):
    """Delays every batch until the monitor has four samples, so that every rank has something to report."""

    def __init__(self, watched: InterferenceMonitor) -> None:
        self._watched = watched
        self.everyone: list[Any] = []

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        monitor = self._watched._monitor
        while monitor is not None and len(monitor.to_curves().times) < 4:
            time.sleep(0.01)

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.everyone = self._watched.everyone()


def trained(rank: int, folder: str, schedule: str) -> dict[str, Any]:
    """Train on this rank, and return the observations, the report, and the monitor threads that are left."""
    monitoring.host_sources = lambda thread: [Numbered(rank)]
    interference_monitor.MIN_PUBLICATION_SECONDS = 0.0
    watch = InterferenceMonitor(hertz=10, window=1000, every_n_steps=2)  # long enough for a machine of any speed
    slowly = Slowly(watch)
    logger = CSVLogger(folder, name=schedule, version="")
    strategy = PipelineStrategy({"1f1b": Flushed, "pipedream": Streamed}[schedule]())
    fit(Lit(), strategy, 2, logger=logger, callbacks=[watch, slowly], max_epochs=3, log_every_n_steps=1)
    saved = strategy.report.save(Path(folder) / f"report-{schedule}-{rank}")
    return {
        "everyone": slowly.everyone,
        "seen": [(look.devices, look.free) for looks in SEEN for look in looks],
        "monitors": [t.name for t in threading.enumerate() if t.name == "monitor"],
        "page": saved.page.read_text(),
        "record": str(saved.record),
    }


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_it_is_told_to_loggers_planners_and_the_report(schedule, tmp_path):
    """Check that the samples of both ranks reach the logger, the planner and the report.

    The schedule "1f1b" flushes after each batch. With "pipedream", batches overlap and ranks never wait for each other.
    """
    ranks = run_ranks(trained, 2, str(tmp_path), schedule, timeout=90)
    with open(tmp_path / schedule / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row.get(f"{PREFIX}gpu.number_count.rank0")]
    assert [row["step"] for row in rows] == ["2", "4", "6", "8"]
    last = rows[-1]
    assert float(last[f"{PREFIX}gpu.number_count.rank1"]) == 1.0
    assert f"{PREFIX}gpu.missing_share.rank0" not in last  # NaN is not logged, neither as a number nor as 0
    for stage in (0, 1):
        assert 0 < float(last[f"{PREFIX}stage{stage}.forward_seconds"]) < 60
        assert 0 < float(last[f"{PREFIX}stage{stage}.backward_seconds"]) < 60
    assert not [name for name in last if name.endswith("_p95")]
    for found in ranks:
        assert found["seen"], "planners have seen nothing"
        for (first, last), free in found["seen"]:  # in the order of the pipeline
            assert first["gpu.number_count"] == 1.0 or math.isnan(first["gpu.number_count"])
            assert last["gpu.number_count"] == 0.0
            assert math.isnan(last["gpu.missing_share"])
            assert free == (None, None)
        assert found["monitors"] == []  # the thread has ended
        assert [set(state.stages) for state in found["everyone"]] == [{1}, {0}]  # the last stage is on rank 0
        assert [state.features["gpu.number_count"] for state in found["everyone"]] == [0.0, 1.0]
        assert "gpu: number" in found["page"]
        assert "pipeline: forward" in found["page"]
        one, zero = RunRecord.load(found["record"]).monitored  # in the order of the pipeline
        assert set(zero.values["gpu.number_count"]) == {0.0}
        assert one.values["gpu.number_count"][:2] == (1.0, 1.0)
        assert set(one.values["gpu.number_count"][2:]) == {None}  # the source failed, and training continued
        assert any(value is not None for value in zero.values["pipeline.forward_seconds"])


def test_times_of_stages_from_what_ran():
    one, two = Span(0, 2), Span(2, 4)
    events = [
        Event(0, F(0, one), 0, 1_000_000_000),
        Event(0, F(0, two), 0, 3_000_000_000),
        Event(0, B(0, one), 0, 5_000_000_000),
        Event(0, Instruction(Kind.I, 2, span=one), 0, 1_000_000_000),
        Event(0, Instruction(Kind.W, 2, span=one), 0, 2_000_000_000),
        Event(0, Instruction(Kind.STEP, 0), 0, 9_000_000_000),
    ]
    found = stage_times(events)
    assert found[0] == StageTimes(2.0, 5.0)
    assert math.isnan(found[2].forward)
    assert found[2].backward == 3.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hertz": 0}, r"InterferenceMonitor: hertz must be above 0 and at most 10, got 0"),
        ({"hertz": 20}, r"hertz must be above 0 and at most 10, got 20"),
        ({"hertz": 1, "window": 1}, r"window must be seconds, at least two samples long \(2\), got 1"),
        ({"every_n_steps": 0}, r"every_n_steps must be at least 1, got 0"),
        ({"hertz": "often"}, r"hertz"),
    ],
)
def test_mistakes(arguments, message):
    """Check the errors for invalid arguments."""
    with pytest.raises((PipelineError, PlanError), match=message):
        InterferenceMonitor(**arguments)


def test_another_strategy():
    """Check the error for a strategy without a pipeline."""
    trainer = make_trainer(devices=1, callbacks=[InterferenceMonitor()])
    with pytest.raises(PipelineError, match=r"this trainer has SingleDeviceStrategy. Set strategy=PipelineStrategy"):
        trainer.fit(Lit())
