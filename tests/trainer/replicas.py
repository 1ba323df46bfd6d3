"""A sampler that gives one process the batches of all replicas together."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import DistributedSampler, Sampler

REPLICAS = 2
SEED = 3
ROWS = 4  # samples in a batch of one replica


class Dealt(Sampler[int]):
    """A sampler for one process that yields the samples of all replicas, batch by batch.

    Each replica has the samples that Lightning's DistributedSampler would give it.
    """

    def __init__(self, rows: int, shuffle: bool) -> None:
        self.samplers = [DistributedSampler(range(rows), REPLICAS, r, shuffle, SEED) for r in range(REPLICAS)]

    def set_epoch(self, epoch: int) -> None:
        for sampler in self.samplers:
            sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        dealt = [list(sampler) for sampler in self.samplers]
        steps = range(0, len(dealt[0]), ROWS)
        return iter([n for step in steps for mine in dealt for n in mine[step : step + ROWS]])

    def __len__(self) -> int:
        return sum(map(len, self.samplers))
