"""What ranks tell each other after a failure."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from lightning_pipes.engine.watch.failure import FailureWatch
from lightning_pipes.engine.watch.shared_store import store_on_loopback
from lightning_pipes.testing.ranks import scale_timeout


@pytest.fixture
def watches() -> Iterator[list[FailureWatch]]:
    store = store_on_loopback(0, timedelta(seconds=20))
    made = [FailureWatch(store.clone(), rank, 3, enforce=False) for rank in range(3)]
    yield made
    for watch in made:
        watch.close()


def test_texts_are_those_of_all_ranks(watches: list[FailureWatch]) -> None:
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(watch.exchange_texts, "a", str(n), 20.0) for n, watch in enumerate(watches)]
        assert [each.result() for each in asked] == [["0", "1", "2"]] * 3


def test_nobody_waits_where_one_refuses(watches: list[FailureWatch]) -> None:
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(watch.exchange_texts, "a", "", 20.0) for watch in watches[:2]]
        assert watches[2].exchange_texts("a", None, 0.0) == []
        assert [each.result() for each in asked] == [[], []]
    assert time.monotonic() - began < scale_timeout(5.0)


def test_who_comes_too_late_gets_none(watches: list[FailureWatch]) -> None:
    """The texts of others are there, but they have gone on without it."""
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda watch: watch.exchange_texts("a", "", 0.1), watches[:2])) == [[], []]
    assert watches[2].exchange_texts("a", "", 20.0) == []


def test_failure_names_an_error_without_text(watches: list[FailureWatch]) -> None:
    watches[0].report_failure(KeyboardInterrupt())
    assert str(watches[0].error) == "rank 0 failed: KeyboardInterrupt"
