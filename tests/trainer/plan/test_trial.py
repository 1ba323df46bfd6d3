"""What a trial makes of steps that something else on the machine has disturbed: on virtual durations."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from statistics import median

import pytest

from lightning_pipes.trainer.plan.trial import StepTiming, counting, needs_more_steps, waited_so_far

STEP, DISTURBED = 152.0, 181.0
"""Milliseconds."""
FEW = 16


def turns(disturbed: Sequence[bool], seen: bool = True) -> Iterator[StepTiming]:
    """Steps of which some are disturbed: a rank waits for a core in them, unless nobody can see that."""
    draw = random.Random(0)
    for slow in disturbed:
        took = (DISTURBED if slow else STEP) * draw.uniform(0.98, 1.02)
        yield StepTiming(took, took - STEP if slow and seen else 0.01 * took)


def trial(disturbed: Sequence[bool], seen: bool = True) -> tuple[float, int]:
    """Milliseconds of a step, as a trial has them, and how many steps it took; the last one of `disturbed` goes on."""
    endless = turns([*disturbed, *[disturbed[-1]] * 1000], seen)
    found: list[StepTiming] = []
    while needs_more_steps(found, FEW):
        found.append(next(endless))
    return median(found[number].took for number in counting(found)), len(found)


@pytest.mark.parametrize(("first", "seen"), [(0, True), (1, True), (12, True), (0, False), (7, False)])
def test_a_moment_does_not_count(first: int, seen: bool) -> None:
    took, count = trial([n < first for n in range(FEW)], seen)
    assert abs(took / STEP - 1) < 0.02
    assert count == FEW


def test_a_trial_that_is_disturbed_all_the_time_goes_on() -> None:
    took, count = trial([True] * FEW + [False] * FEW)
    assert abs(took / STEP - 1) < 0.02
    assert FEW < count <= 2 * FEW


def test_what_never_ends_belongs_to_the_machine() -> None:
    took, count = trial([True])
    assert abs(took / DISTURBED - 1) < 0.02
    assert count == 2 * FEW


def test_of_neighbours_that_stay_the_least_counts() -> None:
    """Steps by what they had to wait; half of them had bad luck."""
    found = [StepTiming(STEP + waited, waited) for waited in (80.0, 20.0, 90.0, 22.0, 18.0)]
    assert counting(found) == [1, 3, 4]


def test_one_turn_is_enough_where_turns_are_long() -> None:
    found = [*turns([False])]
    assert not needs_more_steps(found, 1)
    assert counting(found) == [0]


def test_a_thread_that_works_has_hardly_waited() -> None:
    assert 0 <= waited_so_far() <= waited_so_far()
