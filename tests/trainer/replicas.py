"""The batches of replicas, dealt from those of one process."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import DistributedSampler, Sampler

REPLICAS = 2
SEED = 3
ROWS = 4  # samples of one replica's batch


class Dealt(Sampler[int]):
    """For one process: what Lightning's DistributedSampler deals out to the replicas, batch by batch."""

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
