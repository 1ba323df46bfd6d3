"""Steps of a batch's own parameters.

A supernet has hundreds of times as many parameters as a batch; a step takes no time for the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.optim import Optimizer


class PartialSteps:
    """Where the parameters of some optimizers are; made anew when these get others.

    Args:
        optimizers: with parameters that stay while this is used.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._places = [
            {id(p): (number, at) for number, group in enumerate(o.param_groups) for at, p in enumerate(group["params"])}
            for o in optimizers
        ]

    @contextmanager
    def restrict_optimizer(
        self, number: int, optimizer: Optimizer, parameters: Collection[torch.Tensor]
    ) -> Iterator[None]:
        """Within the block the optimizer with this number has these parameters and no others."""
        places = self._places[number]
        found = sorted(places[id(p)] for p in parameters if id(p) in places)
        whole = [group["params"] for group in optimizer.param_groups]
        for group, (n, all_of_it) in zip(optimizer.param_groups, enumerate(whole), strict=True):
            group["params"] = [all_of_it[at] for of_group, at in found if of_group == n]
        try:
            yield
        finally:
            for group, all_of_it in zip(optimizer.param_groups, whole, strict=True):
                group["params"] = all_of_it
