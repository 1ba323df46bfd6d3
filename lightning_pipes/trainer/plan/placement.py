"""The layers of each stage as a checkpoint keeps them: where batches overlap, weights depend on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from lightning_pipes.ir import Span


@dataclass(frozen=True)
class Placement:
    """Layers on stages, and stages on ranks.

    Attributes:
        layers: of each stage.
        ranks: of each stage.
        partition: the argument of the run that had them.
    """

    layers: tuple[Span, ...]
    ranks: tuple[int, ...]
    partition: str | Sequence[int]

    def data(self) -> dict[str, Any]:
        """Return plain lists, which a checkpoint that is read with `weights_only` may hold."""
        partition = self.partition if isinstance(self.partition, str) else [*self.partition]
        return {"layers": [[*span] for span in self.layers], "ranks": [*self.ranks], "partition": partition}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        """Return what `data` made."""
        return cls(tuple(Span(a, b) for a, b in data["layers"]), tuple(data["ranks"]), data["partition"])

    @property
    def cuts(self) -> list[int]:
        """The layers at which stages 1, 2, ... begin."""
        return [span.start for span in self.layers[1:]]
