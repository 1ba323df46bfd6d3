"""By how many looks one should have gone, on tables small enough to check by hand."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_pipes.strategies.dynpipe.history import looks_that_count, select_history_length

A, B = [1.0, 2.0], [2.0, 1.0]
"""Looks in which partition 0 takes one second and partition 1 two, and the other way round."""


@pytest.mark.parametrize(
    ("last", "expected"),
    [([B, B], 1), ([A, B], None), ([B, A], None), ([A, A], None), ([B], 1), ([B, B, B, [1.1, 1.0]], 1)],
)
def test_both_halves_have_to_want_it(last: list[list[float]], expected: int | None) -> None:
    assert select_history_length(np.array(last), 0, 0.05) == expected


def test_each_half_is_tried_on_the_other() -> None:
    """Each look has its own best partition, by far; none of them saves anything in the other look."""
    assert select_history_length(np.array([[2.0, 1.0, 2.0], [2.0, 2.0, 1.0]]), 0, 0.05) is None


def test_what_stays_is_followed_by_few_looks() -> None:
    looks = np.array(([A] * 8 + [B] * 8) * 2)
    assert looks_that_count(looks, 1, [0, 1], 2, 0.05) == (2, None)
    assert looks_that_count(np.array([A] * 10 + [B] * 2), 0, [0], 2, 0.05) == (2, None)
    assert looks_that_count(np.array([A] * 12), 0, [0], 2, 0.05) == (2, None)  # no reason for anything else


def test_what_soon_goes_is_not_followed() -> None:
    """Two looks each, and who goes by two is late every time; the partition that takes less on the whole is that to
    stay with."""
    looks = np.array(([A] * 2 + [[1.5, 1.0]] * 2) * 4)
    assert looks_that_count(looks, 1, [0, 1], 2, 0.05) == (16, 0)
    assert looks_that_count(looks, 1, [1], 2, 0.05)[1] in (None, 1)


def test_more_looks_where_they_served_better() -> None:
    """Most of the time partition 1 is better, and nobody may stay with it: four looks and more find that out."""
    chance = np.random.default_rng(0)
    looks = np.array([[1.3, 1.0] if chance.random() < 0.7 else [1.0, 1.3] for _ in range(32)])
    number, stay = looks_that_count(looks, 0, [0], 2, 0.05)
    assert number > 2
    assert stay is None
