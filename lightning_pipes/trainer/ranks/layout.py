"""Where stages and layers sit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_pipes.ir import Span
from lightning_pipes.trainer.ranks.grid import Grid


@dataclass(frozen=True)
class Layout:
    """The stages of a pipeline on its processes; its last stage is on the first of them.

    A *rank* is one of the pipeline in the order of the plan, a *place* one in the order of the global ranks.

    Attributes:
        ranks: the rank of each stage.
        layers: the layers of each stage.
    """

    grid: Grid
    ranks: tuple[int, ...]
    layers: tuple[Span, ...]

    @property
    def places(self) -> list[int]:
        """The place of each rank."""
        return places(self.ranks, self.grid.length)

    @property
    def rank(self) -> int:
        """That of this process."""
        return self.places.index(self.grid.place)

    @property
    def global_ranks(self) -> list[int]:
        """The global rank of each rank of this pipeline."""
        return [self.grid.pipeline[place] for place in self.places]

    @property
    def stage_of_layer(self) -> list[int]:
        """By number of the layer."""
        return [s for s, span in enumerate(self.layers) for _ in range(span.rows)]

    @property
    def place_of_layer(self) -> list[int]:
        """By number of the layer."""
        here = self.places
        return [here[self.ranks[s]] for s in self.stage_of_layer]

    @property
    def rank_of_layer(self) -> list[int]:
        """The global rank, by number of the layer."""
        return [self.grid.pipeline[place] for place in self.place_of_layer]

    @property
    def local(self) -> list[int]:
        """Numbers of the layers that live on this process."""
        return [n for n, place in enumerate(self.place_of_layer) if place == self.grid.place]

    def stages_of_processes(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Every global rank with its stages."""
        for pipeline in self.grid.pipelines:
            for rank, place in enumerate(self.places):
                yield pipeline[place], tuple(s for s, r in enumerate(self.ranks) if r == rank)


def places(ranks: tuple[int, ...], length: int) -> list[int]:
    """The place of each of `length` ranks, for stages on `ranks`."""
    return [(ranks[-1] - r) % length for r in range(length)]
