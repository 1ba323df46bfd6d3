import numpy as np
import pytest

from benchmarks.papers.dynpipe.planner import row_shares
from lightning_pipes.ir import InputError


def test_a_replica_that_takes_twice_as_long_gets_half_as_many() -> None:
    assert row_shares(30, [1.0, 2.0]) == (20, 10)
    assert row_shares(7, [1.0, 1.0, 1.0]) == (3, 2, 2)
    assert row_shares(10, [1.0, 1.5, 1.0]) == (4, 2, 4)  # 3.75, 2.5, 3.75: the largest remainders


def test_every_share_is_within_a_row_of_its_part_and_all_rows_are_there() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        rows, seconds = int(rng.integers(1, 200)), rng.uniform(0.1, 3, rng.integers(1, 9)).tolist()
        shares = row_shares(rows, seconds)
        exact = [rows / s / sum(1 / t for t in seconds) for s in seconds]
        assert sum(shares) == rows
        assert all(abs(a - b) < 1 for a, b in zip(shares, exact, strict=True))


def test_replicas_take_time() -> None:
    with pytest.raises(InputError, match="above 0"):
        row_shares(4, [1.0, 0.0])
