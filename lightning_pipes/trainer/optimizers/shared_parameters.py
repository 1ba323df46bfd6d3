"""Parameters that several ranks hold: parameters outside of the pipelined module, and parameters shared by stages.

Each holder has a copy, and computes only a part of the gradient. The parts are summed before the optimizer steps.
Because the sums and the optimizer states are equal, the copies stay equal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import nn

from lightning_pipes.engine.compute.reducer import Bucket, TrainableParameters, Wait, make_buckets
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.holdings import Holders, Holdings


class SharedParameters:
    """Sums the gradients of parameters that several ranks hold over these ranks.

    Collective over the ranks of `control`. An instance is valid as long as no layer moves.

    Args:
        parameters: the parameters of this rank, without the parameters of a Reducer. Parameters that no other rank
            holds are ignored.
        holdings: the placement of the parameters.
        control: the collectives of all ranks.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], holdings: Holdings, control: Control) -> None:
        self._control = control
        self._replicas = holdings.grid.replicas
        holders, grid = holdings.holders, holdings.grid
        several = sorted({positions for positions in holders.values() if len(grid.on_all_replicas(positions)) > 1})
        groups = {
            positions: [control.subgroup(grid.on_all_replicas(positions, n)) for n in range(grid.shards)][grid.shard]
            for positions in several
        }
        self._shared = [(groups[p], found) for p, found in _by_holders(parameters, holders).items() if p in groups]
        self._trained = TrainableParameters(p for _, found in self._shared for p in found)
        self._sets = self._in_buckets()

    def sum_gradients(self) -> None:
        """Replace the gradient of every shared parameter by the sum over its holders, averaged over the replicas.

        The gradient stays None if it is None on all holders.

        Raises:
            PipelineError: a gradient is sparse.
        """
        if self._trained.add_trainable():
            self._sets = self._in_buckets()
        for group, found in self._sets:
            for bucket in found:
                bucket.start(partial(self._all_reduce, group))
                bucket.finish(self._replicas)

    def _in_buckets(self) -> list[tuple[object, list[Bucket]]]:
        return [(group, make_buckets(filter(self._trained.is_known, found))) for group, found in self._shared]

    def sum_gradients_of(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace the gradients of some parameters by the sums over their holders, averaged over the replicas.

        All holders must call this.
        """
        wanted = {id(p) for p in parameters}
        for group, found in self._shared:
            for bucket in make_buckets(p for p in found if id(p) in wanted):
                bucket.start(partial(self._all_reduce, group))
                bucket.finish(self._replicas)

    def _all_reduce(self, group: object, flat: torch.Tensor) -> Wait:
        self._control.all_reduce(flat, group=group)
        return lambda: None


def _by_holders(parameters: Iterable[nn.Parameter], holders: Holders) -> dict[tuple[int, ...], list[nn.Parameter]]:
    here = {id(p): p for p in parameters}
    found: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
    for key, positions in holders.items():  # in the order of the whole module, which is the same on all holders
        if key in here:
            found[positions].append(here[key])
    return dict(sorted(found.items()))
