"""Tests of `ScheduleTuner`, which changes the schedule during training.

Ranks and gradients are real. The measured durations are replaced by durations as slow links would cause them.
"""

from __future__ import annotations

import csv
from collections import Counter
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipes import PipelineStrategy, ScheduleTuner
from lightning_pipes.ir import SEND_KINDS, STEP, B, F, Instruction, Kind, PipelineError, Plan, Program
from lightning_pipes.planning.measured import StepSample
from lightning_pipes.planning.memory import held_rows
from lightning_pipes.sim import Event
from lightning_pipes.strategies.kfkb import KFKB
from lightning_pipes.strategies.ready import Ready
from lightning_pipes.testing.ranks import run_ranks, watch_ranks
from lightning_pipes.trainer.callbacks import schedule_tuner
from tests.trainer.lit import quiet
from tests.trainers import make_trainer

BATCHES, RANKS, MICROBATCHES = 12, 3, 8
HOLDING = (Kind.F, Kind.B, Kind.I, Kind.W)
METRICS = {f"tuner/{name}" for name in ("predicted_ms", "gain", "error", "unsteadiness", "slack", "stalled", "ms")}


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.1)) for _ in range(6)])

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return ((self.layers(batch[0]) - batch[1]) ** 2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Watch(pl.Callback):
    """Records the schedule of each batch and the number of samples that its stage held."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.held: list[tuple[int, int]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        window = trainer.strategy.current_run.windows[-1]
        stage = window.events[-1].instruction.stage
        mine = Program((tuple(e.instruction for e in window.events if e.instruction.kind in HOLDING),))
        stage = mine.head[0][0].stage
        order = window.order
        most = held_rows(order, window.plan) if isinstance(order, Program) else order.rule(window.plan).limits
        self.held.append((held_rows(mine, window.plan)[stage], most[stage]))
        self.ran.append(str(trainer.strategy.schedule))


def stamps(slow: Any) -> Any:
    """Return a replacement for `sample_of`.

    It reports forwards of 1 ms, backwards of 2 ms, and messages of `slow(n)` seconds in the n-th sample.
    """
    seen = Counter[str]()
    original = schedule_tuner.sample_of

    def sample(before: Any, window: Any) -> StepSample:
        seen["windows"] += 1
        found = original(before, window)
        takes = {Kind.F: 1e6, Kind.B: 2e6, Kind.I: 1e6, Kind.W: 1e6}
        means = {key: 1e9 * slow(seen["windows"]) if key[0] in SEND_KINDS else takes[key[0]] for key in found.means}
        return found._replace(means=means, spread=dict.fromkeys(found.spread, 0.0), lag=0.0)

    return sample


def fit(folder: Path, schedule: Any, tuner: ScheduleTuner | None = None, **options: Any) -> dict[str, Any]:
    """Train for one epoch and return the schedules, the decisions of the tuner, and the weights."""
    quiet()
    pl.seed_everything(1, verbose=False)
    g = torch.Generator().manual_seed(2)
    rows = TensorDataset(torch.randn(BATCHES * 16, 6, generator=g), torch.randn(BATCHES * 16, 6, generator=g))
    watch, module = Watch(), Net()
    trainer = make_trainer(
        devices=RANKS,
        strategy=PipelineStrategy(schedule, microbatches=MICROBATCHES, partition="parameters"),
        max_epochs=1,
        logger=CSVLogger(str(folder), name="", version=""),
        log_every_n_steps=1,
        callbacks=[watch, *([tuner] if tuner else [])],
        **options,
    )
    trainer.fit(module, DataLoader(rows, batch_size=16))
    return {
        "ran": watch.ran,
        "held": watch.held,
        "weights": {n: v.numpy() for n, v in module.state_dict().items()},
        "callbacks": [type(c).__name__ for c in trainer.callbacks],
        "decisions": [str(t.decision) for t in tuner.decisions] if tuner else [],
        "at": [t.batch for t in tuner.decisions] if tuner else [],
    }


def tuned(rank: int, folder: str) -> dict[str, Any]:
    """Return the results of trainings with slow links, free links, and several settings of the tuner."""
    original, parts = schedule_tuner.sample_of, schedule_tuner.parts_of
    schedule_tuner.MAX_DECISION_SHARE = 1e9  # batches last a millisecond, so the tuner would decide rarely
    schedule_tuner.sample_of = stamps(lambda n: 0.0 if n < 2 else 0.001)  # type: ignore[assignment]
    found = {"slow": fit(Path(folder, "slow"), KFKB("auto"), ScheduleTuner(3, "1GiB", window=1))}
    schedule_tuner.parts_of = lambda profile, layers: dict.fromkeys(range(RANKS), (0.5, 0.5))  # type: ignore[assignment]
    schedule_tuner.sample_of = stamps(lambda n: 0.0 if n < 2 else 0.001)  # type: ignore[assignment]
    found["split"] = fit(Path(folder, "split"), KFKB("auto"), ScheduleTuner(3, "1GiB", window=1))
    schedule_tuner.parts_of = parts  # type: ignore[assignment]
    schedule_tuner.sample_of = stamps(lambda n: 0.0)  # type: ignore[assignment]
    found["fast"] = fit(Path(folder, "fast"), KFKB("auto"))
    found["other sizes"] = fit(Path(folder, "sizes"), KFKB(2), ScheduleTuner(2, window=1, sizes=(1, 2, 4)))
    schedule_tuner.sample_of = original  # type: ignore[assignment]
    found["probing"] = fit(Path(folder, "probing"), "kfkb", ScheduleTuner(4, window=2, probe=True))
    found["plain"] = fit(Path(folder, "plain"), "1f1b")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tuned")


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict[str, Any]]:
    return run_ranks(tuned, RANKS, str(folder), timeout=90)


def test_all_ranks_change_between_the_same_batches(ranks):
    ran = ranks[0]["slow"]["ran"]
    assert all(r["slow"]["ran"] == ran for r in ranks)
    first = next(n for n, schedule in enumerate(ran) if schedule != ran[0])
    assert ran == [str(KFKB("auto"))] * first + [ran[first]] * (BATCHES - first)
    assert "Deep" in ran[first]


def test_only_rank_0_decides_at_the_batches_told(ranks):
    assert ranks[0]["slow"]["at"] == [2, 3, 6, 9, 12]
    assert ranks[1]["slow"]["decisions"] == []
    first, second, third, *_ = ranks[0]["slow"]["decisions"]
    assert first.startswith("free links: stays with kfkb k=1, 8 micro-batches")
    changes = [d for d in (second, third) if "changes to deep" in d]
    assert len(changes) == 1
    assert changes[0].startswith("slow links: kfkb k=1, 8 micro-batches takes")


@pytest.mark.parametrize("run", ["slow", "split"])
def test_weights_are_bitwise_equal_to_1f1b(ranks, run):
    for r in ranks:
        for name, value in r["plain"]["weights"].items():
            assert (r[run]["weights"][name] == value).all(), name


def test_backwards_are_split_where_it_is_known_what_that_takes(ranks):
    """Check that the tuner changes to ZeroBubble once the durations of the two halves of a backward are known."""
    for r in ranks:
        assert r["split"]["ran"][0] == str(KFKB("auto"))
        assert "ZeroBubble" in r["split"]["ran"][-1]


def test_stages_hold_what_is_predicted(ranks):
    """Check that no stage holds more samples than its order predicts, and equally many if the order is fixed."""
    for r in ranks:
        for run in r.values():
            assert len(run["held"]) == BATCHES
            assert all(held <= most for held, most in run["held"])
        assert all(held == most for held, most in r["slow"]["held"])  # the order is fixed


def test_auto_brings_a_tuner_along_which_leaves_free_links_alone(ranks):
    assert "ScheduleTuner" in ranks[0]["fast"]["callbacks"]
    assert set(ranks[0]["fast"]["ran"]) == {str(KFKB("auto"))}
    assert "ScheduleTuner" not in ranks[0]["plain"]["callbacks"]
    assert ranks[0]["slow"]["callbacks"].count("ScheduleTuner") == 1


def test_other_sizes_are_tried(ranks):
    """Check that the tuner tries micro-batches of other sizes and ends with the largest size.

    Computations take the same time for any size here. The tuner first assumes times in proportion to the size, so small
    micro-batches look best. After measuring them, it prefers the largest size, which needs the fewest micro-batches.
    """
    decisions = ranks[0]["other sizes"]["decisions"]
    assert "16 micro-batches" in decisions[0]
    assert decisions[0].endswith("extrapolated")
    assert "4 micro-batches" in decisions[-1]
    assert "stays with" in decisions[-1]


def test_links_can_be_probed(ranks):
    assert ranks[0]["probing"]["at"] == [2, 4, 8, 12]
    for r in ranks:
        assert all((r["probing"]["weights"][n] == v).all() for n, v in r["plain"]["weights"].items())


def too_small(rank: int, folder: str) -> None:
    fit(Path(folder), KFKB("auto"), ScheduleTuner(memory_limit="1KiB"))


def test_limit_that_1f1b_exceeds_ends_all_ranks_with_the_missing_bytes(tmp_path):
    outcomes = watch_ranks(too_small, RANKS, str(tmp_path), timeout=40)
    assert all("may have 1 KiB" in o.error for o in outcomes), [o.error for o in outcomes]
    assert "are missing with 1F1B and micro-batches of 2 samples" in outcomes[0].error


def test_scalars(ranks, folder):
    with open(folder / "slow" / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["tuner/ms"]]
    assert [int(row["step"]) for row in rows] == [2, 3, 6, 9, 12]
    assert set(rows[0]) >= METRICS
    gains = [float(row["tuner/gain"]) for row in rows]
    assert [g > 0.05 for g in gains].count(True) == 1
    assert all(float(row["tuner/ms"]) > 0 for row in rows)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ScheduleTuner(0), "interval must be at least 1, got 0"),
        (lambda: ScheduleTuner(timedelta(seconds=-1)), "must be longer than nothing"),
        (lambda: ScheduleTuner(window=0), "window must be at least 1, got 0"),
        (lambda: ScheduleTuner(hysteresis=2), "hysteresis must be a share of a step"),
        (lambda: ScheduleTuner(memory_limit="much"), "much"),
    ],
)
def test_settings_that_make_no_sense(make, said):
    with pytest.raises(PipelineError, match=said):
        make()


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ("auto", "ScheduleTuner needs PipelineStrategy; this trainer has SingleDeviceStrategy"),
        (PipelineStrategy(Ready()), "schedule ready has no candidates that it can change to; start with 'kfkb'"),
    ],
)
def test_needs_a_strategy_and_a_schedule_that_know_what_to_change(strategy, said):
    trainer = make_trainer(devices=1, strategy=strategy)
    with pytest.raises(PipelineError, match=said):
        ScheduleTuner().on_fit_start(trainer, Net())


def test_who_still_updates_may_have_messages_already():
    """Check that a message may arrive while its receiver still updates its weights."""
    plan = Plan.even(2, 1)
    (span,) = plan.spans(Kind.F, 0)
    before = [Event(1, B(1, span), 0, 10), Event(1, STEP(1), 10, 90)]
    now = [Event(0, Instruction(Kind.SF, 0, span=span), 50, 60), Event(1, F(1, span), 91, 95)]
    windows = [SimpleNamespace(events=events, plan=plan, order=KFKB(1).program(plan)) for events in (before, now)]
    found = schedule_tuner.sample_of(*windows)
    assert found.means[Kind.SF, 0, 1] == 10
    assert not found.impossible


class TestWait:
    """Tests of the number of batches until the next decision."""

    def wait(self, interval, step, seconds):
        return ScheduleTuner(interval)._wait(step, schedule_tuner.TuningRecord(1, None, step, seconds))  # type: ignore[arg-type]

    def test_batches(self):
        assert self.wait(50, step=1.0, seconds=0.01) == 50

    def test_time(self):
        assert self.wait(timedelta(seconds=60), step=0.5, seconds=0.01) == 120
        assert self.wait(timedelta(seconds=1), step=10.0, seconds=0.01) == 1

    def test_rarer_where_deciding_takes_long(self):
        assert self.wait(10, step=0.02, seconds=0.01) == 100  # 10 ms are 0.5 % of 2 s
        assert self.wait(10, step=0.02, seconds=10.0) == 200  # a setup that takes long does not count forever
        assert self.wait(10, step=0.0, seconds=0.01) == 10
