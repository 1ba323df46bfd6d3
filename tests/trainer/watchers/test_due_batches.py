"""Tests of the choice of the batches that are compared."""

from __future__ import annotations

from lightning_pipes.ir.clock import use_clock
from lightning_pipes.trainer.watchers.due_batches import MAX_COMPARISON_SHARE, DueBatches
from tests.virtual_clock import VirtualClock


def due_batches(epochs: int, batches: int, seconds: float, seed: int = 0) -> tuple[list[int], float]:
    """Return the numbers of the batches that are due, and the share of the time that comparisons take.

    Args:
        epochs: the number of epochs.
        batches: the number of batches of an epoch.
        seconds: the time of a comparison. A batch takes 1 second.
        seed: the seed of random batches.
    """
    clock, found, spent = VirtualClock(), [], 0.0
    with use_clock(clock):
        due = DueBatches(seed, lambda answer: answer)
        for epoch in range(epochs):
            for batch in range(batches):
                if due.is_due(epoch, batch == 0):
                    found.append(epoch * batches + batch)
                    clock.sleep(seconds)
                    due.note_seconds(seconds)
                    spent += seconds
                clock.sleep(1.0)
    return found, spent / (epochs * batches + spent)


def test_batches_at_growing_distances_are_always_due() -> None:
    found, _ = due_batches(1, 70, seconds=1e9)
    assert found == [0, 1, 2, 4, 8, 16, 32, 64]


def test_first_batches_of_epochs_are_due() -> None:
    found, _ = due_batches(5, 10, seconds=1e-3)
    assert {0, 10, 20, 30, 40} <= {*found}
    expensive, _ = due_batches(5, 10, seconds=100.0)
    assert expensive == [0, 1, 2, 4, 8, 10, 16, 20, 32, 40]


def test_further_batches_take_a_small_share_of_the_time() -> None:
    found, share = due_batches(1, 20_000, seconds=2.0)
    powers = 1 + 15
    assert len(found) > 3 * powers
    assert (share - 2.0 * powers / 20_000) <= MAX_COMPARISON_SHARE
    cheap, _ = due_batches(1, 20_000, seconds=1e-6)
    assert len(cheap) > len(found)


def test_the_answer_of_one_rank_counts() -> None:
    due = DueBatches(0, lambda answer: False)
    assert [n for n in range(1000) if due.is_due(n // 10, n % 10 == 0)] == sorted(
        {0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512} | {10, 20, 40, 80, 160, 320, 640}
    )
