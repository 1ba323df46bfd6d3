"""Tests of watchers: their order, their cost, and that a step gives the same results without them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from lightning_pipes.testing.ranks import run_ranks
from lightning_pipes.trainer.loop.watcher import Around, EvaluationWatcher, Step, TrainingStep, Watcher, Watchers
from tests.trainer.lit import Case, differences, train

STEP: Any = SimpleNamespace()
SCHEDULES = ["1f1b", "pipedream"]


class Noting(Watcher):
    """Notes each of its methods that is called."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def before_batch(self, step: TrainingStep) -> None:
        self.notes.append(f"before {self.name}")

    def around_batch(self, step: TrainingStep) -> Around:
        self.notes.append(f"around {self.name}")
        return self._inside()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self.notes.append(f"enter {self.name}")
        yield
        self.notes.append(f"leave {self.name}")


class OnlyAfter(EvaluationWatcher):
    """Notes only the end of each batch, also in evaluation."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    def after_batch(self, step: Step) -> None:
        self.notes.append("after")


def test_moments_come_in_the_order_of_the_list() -> None:
    notes: list[str] = []
    watchers = Watchers([Noting("a", notes), OnlyAfter(notes), Noting("b", notes)])
    watchers.before_batch(STEP)
    with watchers.around_batch(STEP):
        notes.append("batch")
    watchers.before_optimizer_step(STEP)
    watchers.after_batch(STEP)
    inside = ["around a", "around b", "enter a", "enter b", "batch", "leave b", "leave a"]
    assert notes == ["before a", "before b", *inside, "after"]


def test_a_context_is_left_if_the_next_one_can_not_be_entered() -> None:
    notes: list[str] = []

    class Failing(Watcher):
        def around_batch(self, step: TrainingStep) -> Around:
            return self._inside()

        @contextmanager
        def _inside(self) -> Iterator[None]:
            raise ValueError("no")
            yield

    class Closing(Noting):
        @contextmanager
        def _inside(self) -> Iterator[None]:
            try:
                yield
            finally:
                self.notes.append("left")

    with pytest.raises(ValueError, match="no"):
        Watchers([Closing("a", notes), Failing()]).around_batch(STEP)
    assert notes[-1] == "left"


def test_moments_without_an_override_are_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that methods that no watcher overrides are not called. In the base class, they fail here."""

    def fail(self: Any, step: Any) -> None:
        raise AssertionError("called")

    for moment in ("before_batch", "before_optimizer_step"):
        monkeypatch.setattr(Watcher, moment, fail)
    watchers = Watchers([OnlyAfter([])])
    watchers.before_optimizer_step(STEP)
    with watchers.around_batch(STEP):
        watchers.after_batch(STEP)


def test_evaluated_batches_are_seen_by_those_that_say_so() -> None:
    """Check that only watchers of evaluation see evaluated batches."""
    notes: list[str] = []
    watchers = Watchers([Noting("a", notes), OnlyAfter(notes)]).of_evaluation
    watchers.before_batch(STEP)
    watchers.after_batch(STEP)
    assert notes == ["after"]
    assert watchers.of_evaluation is watchers


class Unwatched(Callback):
    """Removes all watchers when training starts."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        trainer.strategy.current_run.watchers = Watchers()


def runs(rank: int, folder: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Train with each schedule, with and without watchers."""

    def kept(schedule: str, name: str, callbacks: list[Callback]) -> dict[str, Any]:
        case = Case(strategy={"schedule": schedule, "microbatches": 2}, trainer={"callbacks": callbacks})
        return train(case, 2, f"{folder}/{schedule}/{name}")

    return [(kept(s, "watched", []), kept(s, "unwatched", [Unwatched()])) for s in SCHEDULES]


@cache
def results() -> list[list[tuple[dict[str, Any], dict[str, Any]]]]:
    return run_ranks(runs, 2, mkdtemp(), timeout=180)


@pytest.mark.parametrize("number", range(len(SCHEDULES)), ids=SCHEDULES)
@pytest.mark.parametrize("rank", range(2))
def test_a_step_is_the_same_without_watchers(number: int, rank: int) -> None:
    watched, unwatched = results()[rank][number]
    kept = ("weights", "gradients", "metrics", "rows", "steps")  # the first result of a stream is not a number yet
    watched, unwatched = ({k: found[k] for k in kept if k in found} for found in (watched, unwatched))
    assert watched["steps"] > 0
    assert differences(watched, unwatched, tolerance=0.0) == []
