"""The choice of the batches that are compared with their micro-batches."""

from __future__ import annotations

import random
from collections.abc import Callable

from lightning_pipes.ir.clock import read_seconds
from lightning_pipes.trainer.loop.watcher import is_batch_due

MAX_COMPARISON_SHARE = 0.01
"""The largest share of the time of training that comparisons of further batches may take."""
CANDIDATE_PROBABILITY = 1 / 32
"""The probability with which a batch is a candidate for a further comparison."""


class DueBatches:
    """Chooses batches 0, 1, 2, 4, ..., the first ones of epochs 0, 1, 2, 4, ..., and further ones if time permits.

    Further batches are random ones and the first batches of all epochs. Together, their comparisons take at most
    `MAX_COMPARISON_SHARE` of the time since the first batch. Collective, because one rank decides whether time permits.

    Args:
        seed: the seed of the choice of random batches, which is the same on all ranks.
        agree: returns the answer of one rank on all ranks.
    """

    def __init__(self, seed: int, agree: Callable[[bool], bool]) -> None:
        self._seed, self._agree = seed, agree
        self._batches = 0
        self._begun = 0.0
        self._spent = self._last = 0.0
        self._is_further = False

    def is_due(self, epoch: int, begins_epoch: bool) -> bool:
        """Return whether the next batch is compared.

        Args:
            epoch: the number of the epoch.
            begins_epoch: whether the batch is the first one of its epoch.
        """
        number, self._batches = self._batches, self._batches + 1
        if not number:
            self._begun = read_seconds()
        self._is_further = not is_batch_due(number, epoch, begins_epoch)
        if not self._is_further:
            return True
        if not begins_epoch and random.Random(f"{self._seed}/{number}").random() >= CANDIDATE_PROBABILITY:
            return False
        return self._agree(self._spent + self._last <= MAX_COMPARISON_SHARE * (read_seconds() - self._begun))

    def note_seconds(self, seconds: float) -> None:
        """Record the time of the comparison of the latest batch that was due."""
        self._last = seconds
        self._spent += seconds if self._is_further else 0.0
