"""Tests of how a trial treats steps that other processes disturbed, on simulated durations."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from io import BytesIO
from statistics import median

import pytest

from lightning_pipes.trainer.plan import trial as trial_module
from lightning_pipes.trainer.plan.trial import StepTiming, counting, needs_more_steps, waited_so_far

STEP, DISTURBED = 152.0, 181.0
"""Milliseconds of a step without and with a disturbance."""
FEW = 16


def turns(disturbed: Sequence[bool], seen: bool = True) -> Iterator[StepTiming]:
    """Yield the timings of steps, some of them disturbed.

    In a disturbed step, a rank waits for a core. If `seen` is false, this wait is not measured.
    """
    draw = random.Random(0)
    for slow in disturbed:
        took = (DISTURBED if slow else STEP) * draw.uniform(0.98, 1.02)
        yield StepTiming(took, took - STEP if slow and seen else 0.01 * took)


def trial(disturbed: Sequence[bool], seen: bool = True) -> tuple[float, int]:
    """Return the milliseconds per step and the number of steps of a trial.

    After its end, `disturbed` continues with its last value.
    """
    endless = turns([*disturbed, *[disturbed[-1]] * 1000], seen)
    found: list[StepTiming] = []
    while needs_more_steps(found, FEW):
        found.append(next(endless))
    return median(found[number].took for number in counting(found)), len(found)


@pytest.mark.parametrize(("first", "seen"), [(0, True), (1, True), (12, True), (0, False), (7, False)])
def test_a_moment_does_not_count(first: int, seen: bool) -> None:
    """Check that a disturbance at the start of a trial changes neither its result nor its number of steps."""
    took, count = trial([n < first for n in range(FEW)], seen)
    assert abs(took / STEP - 1) < 0.02
    assert count == FEW


def test_trial_that_is_always_disturbed_continues() -> None:
    took, count = trial([True] * FEW + [False] * FEW)
    assert abs(took / STEP - 1) < 0.02
    assert FEW < count <= 2 * FEW


def test_permanent_disturbance_belongs_to_the_machine() -> None:
    """Check that a disturbance that never ends counts as part of the time of a step."""
    took, count = trial([True])
    assert abs(took / DISTURBED - 1) < 0.02
    assert count == 2 * FEW


def test_of_neighbours_that_stay_the_least_counts() -> None:
    """Check that only the steps with the shortest waits count. The other steps happened to wait longer."""
    found = [StepTiming(STEP + waited, waited) for waited in (80.0, 20.0, 90.0, 22.0, 18.0)]
    assert counting(found) == [1, 3, 4]


def test_one_turn_is_enough_where_turns_are_long() -> None:
    """Check that a single step is enough if a trial requires only one, as it does for long steps."""
    found = [*turns([False])]
    assert not needs_more_steps(found, 1)
    assert counting(found) == [0]


def test_the_wait_for_a_core_is_read_from_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the wait is the second number of the scheduler's statistics, and 0 if they are not available."""
    files = {"/proc/thread-self/schedstat": b"900 70 3"}
    monkeypatch.setattr(trial_module, "open", lambda path, mode: BytesIO(files[path]), raising=False)
    assert waited_so_far() == 70
    for unreadable in (b"", b"900", b"no number"):
        files["/proc/thread-self/schedstat"] = unreadable
        assert waited_so_far() == 0
