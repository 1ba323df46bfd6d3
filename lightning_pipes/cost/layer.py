"""The costs of one layer: seconds and bytes by number of rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from lightning_pipes.cost.table import Table, at_rows
from lightning_pipes.ir import InputError, Kind, check_fields, check_number, short_repr

_TIMES = ("forward", "backward", "input_backward", "weight_backward")


@dataclass(frozen=True)
class LayerProfile:
    """One layer's seconds and bytes. Tables are ((rows, value), ...), rows ascending; empty means none.

    Attributes:
        forward: seconds.
        backward: seconds of the full backward.
        input_backward: seconds of the gradients of inputs alone (I); empty where it was not measured.
        weight_backward: seconds of the gradients of weights alone (W).
        step: seconds of its share of the optimizer step.
        weight_bytes: bytes of its parameters and buffers.
        gradient_bytes: bytes of the gradients of its parameters.
        optimizer_bytes: bytes of its optimizer state.
        saved: bytes that it keeps from forward to backward, without weights and without tensors of an earlier layer.
        keeps_input: whether it keeps its input too, which an earlier layer of the same stage counts.
        output: bytes of its output, and of the gradient of its output.
        working: temporary bytes while it runs, the larger of forward and backward.

    Raises:
        InputError: a negative or infinite number, or rows that do not ascend.
    """

    name: str
    forward: Table
    backward: Table
    input_backward: Table = ()
    weight_backward: Table = ()
    step: float = 0.0
    weight_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    saved: Table = ()
    keeps_input: bool = False
    output: Table = ()
    working: Table = ()

    def __post_init__(self) -> None:
        check_fields(self)
        where = f"layer {self.name!r}"
        for name, value in vars(self).items():
            if isinstance(value, tuple):
                rows = [r for r, _ in value]
                if (
                    rows != sorted(set(rows))
                    or min(rows, default=0) < 0
                    or not all(0 <= x < math.inf for _, x in value)
                ):
                    raise InputError(
                        f"{where}: {name} needs ascending rows and finite numbers, none negative, got "
                        f"{short_repr(value)}"
                    )
            elif not isinstance(value, str | bool):
                check_number(f"{where}: {name}", value, "finite and not negative", lambda x: 0 <= x < math.inf)

    def seconds_of(self, kind: Kind) -> Table:
        """Return the seconds of F, B, I or W; for a layer without weights, I is all of B.

        Raises:
            InputError: I or W, which were not measured.
        """
        if kind is Kind.F:
            return self.forward
        if kind is Kind.B:
            return self.backward
        if not self.gradient_bytes:
            return self.backward if kind is Kind.I else ((1, 0.0),)
        table = self.input_backward if kind is Kind.I else self.weight_backward
        if not table:
            raise InputError(
                f"the profile of layer {self.name!r} has no times of {kind}; measure them with split=True, "
                "or choose a schedule with full backwards"
            )
        return table

    def scaled(self, factor: float) -> LayerProfile:
        """Return this layer with forward and backward times multiplied by `factor`."""
        times: dict[str, Any] = {
            name: tuple((rows, value * factor) for rows, value in getattr(self, name)) for name in _TIMES
        }
        return replace(self, **times)

    @staticmethod
    def mean_of(parts: Sequence[LayerProfile]) -> LayerProfile:
        """Return the first of several profiles of one layer, with the mean seconds of all."""
        means: dict[str, Any] = {name: _mean_table([getattr(p, name) for p in parts]) for name in _TIMES}
        return replace(parts[0], step=sum(p.step for p in parts) / len(parts), **means)


def sum_tables(tables: Iterable[Table]) -> Table:
    """Return the sum of tables at all rows that any of them has; linear between them, as each table is."""
    given = [table for table in tables if table]
    rows = sorted(set(chain.from_iterable((r for r, _ in table) for table in given)))
    return tuple((r, sum(at_rows(table, r) for table in given)) for r in rows) or ((1, 0.0),)


def per_row(table: Table) -> float:
    """Return the bytes per row at the largest number of rows of the table."""
    return table[-1][1] / max(table[-1][0], 1) if table else 0.0


def _mean_table(tables: Sequence[Table]) -> Table:
    """Return the means of the tables that have entries; these have the same rows."""
    given = [table for table in tables if table]
    return tuple((at[0][0], sum(value for _, value in at) / len(at)) for at in zip(*given, strict=True))
