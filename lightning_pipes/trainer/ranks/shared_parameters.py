"""Parameters that several ranks hold: those outside the pipelined module, and those tied between stages.

Each holder keeps a copy and sees only its own part of the gradient. The parts are summed before the optimizer steps;
equal sums and equal optimizer states keep the copies equal.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import partial

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_pipes.engine.compute.reducer import Wait, buckets
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.grid import Grid

Holders = dict[int, tuple[int, ...]]
"""By id of a parameter the places in a pipeline where it is held, ascending; in the order of the whole module."""


def holders(module: pl.LightningModule, path: str, place_of_layer: Sequence[int], places: Sequence[int]) -> Holders:
    """Who holds each parameter of the whole module: all `places` what is not inside `path`, that of its layer what
    is, and several what occurs several times."""
    layer_of = {name: number for number, name in enumerate(module.get_submodule(path)._modules)}
    found: dict[int, set[int]] = defaultdict(set)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name.startswith(f"{path}."):
            layer = name[len(path) + 1 :].partition(".")[0]
            found[id(parameter)].add(place_of_layer[layer_of[layer]])
        else:
            found[id(parameter)].update(places)
    return {key: tuple(sorted(where)) for key, where in found.items()}


def held_once(layers_of_stages: Iterable[Sequence[nn.Module]], who: Holders) -> set[int]:
    """Ids of parameters that occur in one stage only, so that one backward completes their gradients."""
    stages_of: Counter[int] = Counter()
    for layers in layers_of_stages:
        stages_of.update({id(p) for layer in layers for p in layer.parameters()})
    return {key for key, stages in stages_of.items() if stages == 1 and len(who[key]) == 1}


class SharedParameters:
    """Parameters of this rank whose gradients are complete when those of other holders are added.

    A collective call: every rank of `control` makes it with the same `who`.

    Args:
        parameters: those of this rank, but for what a Reducer looks after; what nobody else holds is left alone.
        who: the holders of all parameters of the whole module.
        control: of all ranks.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], who: Holders, grid: Grid, control: Control) -> None:
        self._control = control
        self._grid = grid
        self._who = who
        several = sorted({places for places in who.values() if len(grid.everywhere(places)) > 1})
        groups = {places: control.subgroup(grid.everywhere(places)) for places in several}
        self._sets = [(groups[p], buckets(found)) for p, found in self._by_holders(parameters).items() if p in groups]

    def sum_gradients(self) -> None:
        """Replaces the gradient of every shared parameter by the sum over its holders, averaged over the replicas of
        the pipeline; none stays none where nobody has one.

        Raises:
            PipelineError: a gradient is sparse.
        """
        for group, found in self._sets:
            for bucket in found:
                bucket.start(partial(self._all_reduce, group))
                bucket.finish(self._grid.replicas)

    def counts_here(self, parameter: torch.Tensor) -> bool:
        """Whether this rank is the one of the holders that answers for the parameter in a sum over the pipeline."""
        return self._who.get(id(parameter), (self._grid.place,))[0] == self._grid.place

    def _by_holders(self, parameters: Iterable[nn.Parameter]) -> dict[tuple[int, ...], list[nn.Parameter]]:
        here = {id(p): p for p in parameters}
        found: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for key, places in self._who.items():  # in the order of the whole module, as on the other holders
            if key in here:
                found[places].append(here[key])
        return dict(sorted(found.items()))

    def _all_reduce(self, group: object, flat: torch.Tensor) -> Wait:
        self._control.all_reduce(flat, group=group)
        return lambda: None
