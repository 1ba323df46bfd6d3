"""The placement of layers and parameters on ranks. All other modules read it from this record."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch

from lightning_pipes.ir import PlanError, Span
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.ranks.ranks import Grid

OUTSIDE = -1
"""A layer number that stands for everything outside of the pipelined module, which all ranks hold."""
Holders = dict[int, tuple[int, ...]]
"""The positions in a pipeline that hold each parameter, ascending, by `id` of the parameter, in the order of the whole
module."""


class Move(NamedTuple):
    """A layer that moves from one global rank to another."""

    layer: int
    source: int
    target: int


class Holdings:
    """The stages of a pipeline on its processes, and the layers of each stage. The last stage is on the first process.

    A *rank* numbers the ranks of the pipeline in the order of the plan. A *position* numbers them in the order of the
    global ranks.

    Args:
        grid: the coordinates of this rank.
        ranks: the rank of each stage, where all ranks of a stage count as one.
        layers: the layers of each stage.

    Attributes:
        ranks: the first rank of each stage.
        ranks_of_stages: all ranks of each stage.
        positions: the position of each rank.
        stage_of_layer: the stage of each layer.
        position_of_layer: the position of the first rank of each layer.
        positions_of_layer: the positions of all ranks of each layer.
    """

    def __init__(self, grid: Grid, ranks: Sequence[int], layers: Sequence[Span]) -> None:
        self.grid = grid
        ends = [0, *accumulate(grid.degrees)]
        self.ranks = tuple(ends[rank] for rank in ranks) if grid.degrees else tuple(ranks)
        self.ranks_of_stages = tuple(
            tuple(range(ends[rank], ends[rank + 1])) if grid.degrees else (rank,) for rank in ranks
        )
        self.positions = positions_of_ranks(self.ranks, grid.length)
        self.place_layers(layers)
        self._parts_of: dict[int, frozenset[int]] = {}
        """The layers that contain each parameter, or `OUTSIDE`, by `id` of the parameter in the order of the module."""
        self._names: dict[int, str] = {}
        self._numbers: dict[int, int] = {}

    def index_parameters(self, module: pl.LightningModule, path: str) -> None:
        """Record the layers of all parameters of a whole module, which has its pipelined layers at `path`."""
        layer_of = {name: number for number, name in enumerate(module.get_submodule(path)._modules)}

        def layers(name: str, parameter: torch.Tensor) -> Iterable[int]:
            inside = name.startswith(f"{path}.")
            return [layer_of[name[len(path) + 1 :].partition(".")[0]]] if inside else ()

        self.index_weights(module, layers)

    def index_weights(self, module: pl.LightningModule, layers: Callable[[str, torch.Tensor], Iterable[int]]) -> None:
        """Record the layers of all parameters of a whole module.

        Args:
            module: the whole module.
            layers: returns the layers that contain a parameter under a name; nothing if it is outside of them.
        """
        found: dict[int, set[int]] = defaultdict(set)
        for name, parameter in module.named_parameters(remove_duplicate=False):
            found[id(parameter)].update(list(layers(name, parameter)) or [OUTSIDE])
            self._names.setdefault(id(parameter), name)
        self._parts_of = {key: frozenset(parts) for key, parts in found.items()}
        self._numbers = {key: number for number, key in enumerate(found)}

    def place_layers(self, layers: Sequence[Span]) -> None:
        """Record that the stages have these layers now. The caller must have moved them."""
        self.layers = tuple(layers)
        self.stage_of_layer = [s for s, span in enumerate(self.layers) for _ in range(span.rows)]
        self.position_of_layer = [self.positions[self.ranks[s]] for s in self.stage_of_layer]
        positions_of_stages = [tuple(sorted(self.positions[r] for r in ranks)) for ranks in self.ranks_of_stages]
        self.positions_of_layer = [positions_of_stages[s] for s in self.stage_of_layer]

    def list_moves(self, layers: Sequence[Span]) -> list[Move]:
        """Return the layers that move to other processes if the stages get `layers`.

        Raises:
            PlanError: the stages do not contain all layers of the pipeline in order; stages have several ranks; or a
                parameter that several layers share would move without all of these layers, or not from one process to
                one other.
        """
        ends = [0, *(span.stop for span in self.layers)]
        if [span.start for span in layers] != [0, *(span.stop for span in layers)][:-1] or layers[-1].stop != ends[-1]:
            raise PlanError(
                f"the stages of the run have layers {self.layers} and can't have {tuple(layers)}: every layer has to "
                "be in one stage, in order"
            )
        if tuple(layers) == self.layers:
            return []
        if self.grid.degrees:
            raise PlanError(
                f"stages have several ranks, data_parallel={list(self.grid.degrees)}, so their layers {self.layers} "
                "can't change. Leave layers out of the plan, or give each stage one rank"
            )
        after = Holdings(self.grid, self.ranks, layers)
        after._parts_of = self._parts_of
        holders = after.holders
        for key, positions in self.holders.items():
            if (
                holders[key] != positions
                and len(self._parts_of[key]) > 1
                and max(len(holders[key]), len(positions)) > 1
            ):
                parts = " and ".join("the code around" if n == OUTSIDE else str(n) for n in sorted(self._parts_of[key]))
                raise PlanError(
                    f"{self._names[key]} is shared by layers {parts}, which would be on ranks {holders[key]} of the "
                    f"pipeline instead of {positions}. Move layers that share a parameter together, from one rank to "
                    "one other"
                )
        where = enumerate(zip(self.position_of_layer, after.position_of_layer, strict=True))
        return [
            Move(n, *(self.grid.pipeline[position] for position in pair)) for n, pair in where if pair[0] != pair[1]
        ]

    @property
    def tied(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the layers that share a parameter only with each other, and not with code outside of them."""
        groups = {parts for parts in self._parts_of.values() if len(parts) > 1 and OUTSIDE not in parts}
        return tuple(sorted(tuple(sorted(parts)) for parts in groups))

    @property
    def rank(self) -> int:
        """The rank of this process in the order of the plan."""
        return self.positions.index(self.grid.position)

    @property
    def stages(self) -> list[int]:
        """The stages on this process."""
        return [s for s, ranks in enumerate(self.ranks_of_stages) if self.rank in ranks]

    @property
    def global_ranks(self) -> list[int]:
        """The global rank of each rank of this pipeline."""
        return [self.grid.pipeline[position] for position in self.positions]

    @property
    def global_rank_of_layer(self) -> list[int]:
        """The global rank of each layer, by number."""
        return [self.grid.pipeline[position] for position in self.position_of_layer]

    @property
    def local(self) -> list[int]:
        """The numbers of the layers on this process."""
        return [n for n, where in enumerate(self.positions_of_layer) if self.grid.position in where]

    def stages_of_processes(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield every global rank with its stages."""
        for pipeline in self.grid.pipelines:
            for rank, position in enumerate(self.positions):
                yield pipeline[position], tuple(s for s, ranks in enumerate(self.ranks_of_stages) if rank in ranks)

    @property
    def holders(self) -> Holders:
        """The positions that hold each parameter.

        A parameter outside of the pipelined module is held by all positions. A parameter inside is held by the
        positions of every layer that contains it.
        """
        where = {OUTSIDE: range(self.grid.length), **dict(enumerate(self.positions_of_layer))}
        return {
            key: tuple(sorted({position for part in parts for position in where[part]}))
            for key, parts in self._parts_of.items()
        }

    def make_stage_group(self, control: Control) -> Any:
        """Return the process group of the ranks of this rank's stage; None if the stage has one rank. Collective."""
        groups = [
            None if len(ranks) == 1 else control.subgroup([self.global_ranks[r] for r in ranks])
            for ranks in self.ranks_of_stages
        ]
        return groups[self.stages[0]] if self.grid.degrees else None

    def is_owner(self, parameter: torch.Tensor) -> bool:
        """Return whether this rank counts the parameter in a sum over the pipeline. One of its holders does."""
        parts, where = self._parts_of.get(id(parameter), ()), self.position_of_layer
        return (
            min((0 if part == OUTSIDE else where[part] for part in parts), default=self.grid.position)
            == self.grid.position
        )

    @property
    def n_indices(self) -> int:
        """The number of values that `index_of` can return."""
        return len(self._numbers) + 1

    def index_of(self, parameter: torch.Tensor) -> int:
        """Return the index of a parameter in the whole module. Unknown tensors get the last index."""
        return self._numbers.get(id(parameter), len(self._numbers))

    def in_one_stage(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter occurs in a single stage, so that one backward completes its gradient."""
        parts, stages = self._parts_of.get(id(parameter), frozenset()), self.stage_of_layer
        return OUTSIDE not in parts and len({stages[part] for part in parts}) == 1


def positions_of_ranks(ranks: Sequence[int], length: int) -> list[int]:
    """Return the position of each of `length` ranks, for stages on `ranks`."""
    return [(ranks[-1] - r) % length for r in range(length)]
