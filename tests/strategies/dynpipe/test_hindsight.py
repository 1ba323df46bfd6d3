"""Check the best number of windows in hindsight, on tables small enough to verify by hand."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_pipes.strategies.dynpipe.history import looks_that_count, select_history_length

A, B = [1.0, 2.0], [2.0, 1.0]
"""Windows in which partition 0 takes one second and partition 1 two seconds, and the reverse."""


@pytest.mark.parametrize(
    ("last", "expected"),
    [([B, B], 1), ([A, B], None), ([B, A], None), ([A, A], None), ([B], 1), ([B, B, B, [1.1, 1.0]], 1)],
)
def test_both_halves_have_to_want_it(last: list[list[float]], expected: int | None) -> None:
    assert select_history_length(np.array(last), 0, 0.05) == expected


def test_each_half_is_tried_on_the_other() -> None:
    """Check two windows with different best partitions, of which neither saves time in the other window."""
    assert select_history_length(np.array([[2.0, 1.0, 2.0], [2.0, 2.0, 1.0]]), 0, 0.05) is None


def test_lasting_slowdowns_need_few_observations() -> None:
    looks = np.array(([A] * 8 + [B] * 8) * 2)
    assert looks_that_count(looks, 1, [0, 1], 2, 0.05) == (2, None)
    assert looks_that_count(np.array([A] * 10 + [B] * 2), 0, [0], 2, 0.05) == (2, None)
    assert looks_that_count(np.array([A] * 12), 0, [0], 2, 0.05) == (2, None)  # there is no reason for another number


def test_short_slowdowns_are_not_followed() -> None:
    """Check changes that last two windows, so that a decision after two windows is always late.

    The planner should then stay with the partition that takes less time in total.
    """
    looks = np.array(([A] * 2 + [[1.5, 1.0]] * 2) * 4)
    assert looks_that_count(looks, 1, [0, 1], 2, 0.05) == (16, 0)
    assert looks_that_count(looks, 1, [1], 2, 0.05)[1] in (None, 1)


def test_more_looks_where_they_served_better() -> None:
    """Check windows in which partition 1 is mostly better but is not a candidate to stay with.

    Decisions after two windows are too uncertain here, and decisions after four or more are better.
    """
    chance = np.random.default_rng(0)
    looks = np.array([[1.3, 1.0] if chance.random() < 0.7 else [1.0, 1.3] for _ in range(32)])
    number, stay = looks_that_count(looks, 0, [0], 2, 0.05)
    assert number > 2
    assert stay is None
