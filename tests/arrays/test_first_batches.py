"""Test that the order of first batches begins and ends with small ones."""

from lightning_pipes.arrays.arrivals import order_first_batches


def test_large_batches_are_in_the_middle() -> None:
    assert order_first_batches([]) == []
    assert order_first_batches([8, 16, 24, 32, 8, 16, 24]) == [0, 1, 2, 3, 6, 5, 4]
    assert order_first_batches([32, 8, 8]) == [1, 0, 2]
    assert order_first_batches([5, 5, 5]) == [0, 2, 1]
