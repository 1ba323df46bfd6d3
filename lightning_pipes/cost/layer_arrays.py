"""The layers of a model as arrays, which price a thousand partitions without visiting each layer again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from lightning_pipes.cost.table import Table, at_rows
from lightning_pipes.ir import Kind, Span

Array = npt.NDArray[np.float64]


class LayerArrays:
    """Seconds and bytes of a model's parts: the code before the layers, the layers, the code after them.

    Args:
        seconds: by kind, a table of each part.
        numbers: by name, a number of each part.
    """

    def __init__(self, seconds: Mapping[Kind, Sequence[Table]], numbers: Mapping[str, Sequence[float]]) -> None:
        self._tables = seconds
        self._numbers = {name: np.array(values, float) for name, values in numbers.items()}
        lines = [table for tables in seconds.values() for table in tables if len(table) > 1]  # others are constant
        self._rows = sorted({rows for table in lines for rows, _ in table}) or [1]
        self._seconds = {
            kind: np.array([[at_rows(table, rows) for rows in self._rows] for table in tables])
            for kind, tables in seconds.items()
        }
        self._at: dict[tuple[Kind, int], Array] = {}

    def stage_tables(self, kind: Kind, layers: Sequence[Span], speeds: Sequence[float]) -> list[Table]:
        """Return the seconds of each stage that `layers` defines. A table has all rows that any part has; it is linear
        between them, as each part is."""
        sums = _reduce_by_stage(self._seconds[kind], layers, np.add) / np.array(speeds or [1.0] * len(layers))[:, None]
        return [tuple(zip(self._rows, row, strict=True)) for row in sums.tolist()]

    def stage_sums(self, name: str, layers: Sequence[Span]) -> list[float]:
        """Return the sum of a number over each stage."""
        return list(_reduce_by_stage(self._numbers[name], layers, np.add).tolist())

    def stage_maxima(self, name: str, layers: Sequence[Span]) -> list[float]:
        """Return the largest number of each stage."""
        return list(_reduce_by_stage(self._numbers[name], layers, np.maximum).tolist())

    def layer_values(self, name: str) -> Array:
        """Return a number of each layer, without the parts before and after the layers."""
        return self._numbers[name][1:-1]

    def seconds_at(self, kind: Kind, rows: int) -> Array:
        """Return the seconds of each part for one number of rows."""
        known = self._at.get((kind, rows))
        if known is None:
            known = self._at[kind, rows] = np.array([at_rows(table, rows) for table in self._tables[kind]])
        return known


def _reduce_by_stage(values: Array, layers: Sequence[Span], join: np.ufunc) -> Array:
    """Reduce the parts of each stage by `join`. The first stage includes the part before the layers, the last stage the
    part after them. An empty stage gives zeros."""
    starts = np.array([span.start + 1 for span in layers])
    stops = np.array([span.stop + 1 for span in layers])
    starts[0], stops[-1] = 0, len(values)
    filled = stops > starts
    found: Array = np.zeros((len(layers), *values.shape[1:]))
    found[filled] = join.reduceat(values, starts[filled])
    return found
