"""Tests that the values left by micro-batches are merged into the values that the whole batch would leave."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from lightning_pipes.trainer.results.merging import Path, ValueMerger

PATH: Path = ((".", "kept"),)


def left_values(merger: ValueMerger, entries: list[Any], whole: Any) -> Any:
    """Merge the lists to which four micro-batches of two samples append `entries`.

    There is one element of `entries` for each micro-batch.
    """
    before: list[Any] = [object()]
    expected = None if whole is None else [*before, *whole]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        merged = merger.merge(PATH, before, [[*before, *each] for each in entries], [2] * 4, expected)
    assert merged[:1] == before
    return merged[1:]


def test_a_pair_that_is_as_long_as_a_micro_batch_stays_a_pair() -> None:
    merger = ValueMerger("Module")
    assert left_values(merger, [[(0, 3)]] * 4, [(0, 3)]) == [(0, 3)]
    assert left_values(merger, [[(1, 4)]] * 4, None) == [(1, 4)]


def test_a_list_of_two_entries_a_batch_keeps_two() -> None:
    merger = ValueMerger("Module")
    assert left_values(merger, [["a", "b"]] * 4, ["a", "b"]) == ["a", "b"]
    assert left_values(merger, [["c", "d"]] * 4, None) == ["c", "d"]


def test_a_list_with_an_entry_for_each_sample_is_joined() -> None:
    merger = ValueMerger("Module")
    for first, is_compared in ((0, True), (8, False), (16, False)):
        numbers = [*range(first, first + 8)]
        entries = [numbers[n : n + 2] for n in range(0, 8, 2)]
        assert left_values(merger, entries, numbers if is_compared else None) == numbers


def test_each_position_of_a_tuple_is_merged_in_its_own_way() -> None:
    merger = ValueMerger("Module")
    assert left_values(merger, [[(2, 7)]] * 4, [(8, 7)]) == [(8, 7)]
    assert left_values(merger, [[(2, 5)]] * 4, None) == [(8, 5)]


def test_a_value_that_depends_on_random_numbers_is_not_compared() -> None:
    """Check that values that depend on random numbers are not compared, and that a count is still merged as a sum."""
    merger = ValueMerger("Module")
    merger.is_exact = False
    assert merger.merge(((".", "count"),), 0, [2] * 4, [2] * 4, 8) == 8
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert merger.merge(((".", "loss"),), None, [1.0, 2.0, 3.0, 4.0], [2] * 4, 7.0) == 2.5
    with pytest.warns(UserWarning, match="taken for a mean"):
        merger.warn_of_guesses()
