"""Seconds by numbers of rows, and nanoseconds of them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from numbers import Real

from lightning_pipes.cost.links.link import LONGEST
from lightning_pipes.ir import InputError, Kind, shown

Table = tuple[tuple[int, float], ...]
"""(rows, seconds), rows ascending."""


def at_rows(table: Table, rows: int) -> float:
    """`table` at `rows`: linear, beyond its ends too, never negative; 0 where it is empty."""
    if not table:
        return 0.0
    if len(table) == 1:
        return table[0][1]
    right = min(max(bisect_left(table, (rows, -1.0)), 1), len(table) - 1)
    (x0, y0), (x1, y1) = table[right - 1], table[right]
    if rows == x1:
        return y1  # exact: no rounding by the line through it
    return max(0.0, y0 + (y1 - y0) * (rows - x0) / (x1 - x0))


def to_nanoseconds(seconds: float) -> int:
    """The nearest whole number of them.

    Raises:
        InputError: there are too many to be simulated.
    """
    if not seconds < LONGEST:
        raise InputError(f"{seconds:g} s are more than can be simulated; look for a unit that is wrong, or a slow link")
    return round(seconds * 1e9)


def check_table(what: str, table: Table) -> None:
    """InputError unless rows ascend and times are finite and not negative; `what` they are the times of."""
    rows = [r for r, _ in table]
    if not table or rows != sorted(set(rows)) or not all(0 <= t < math.inf for _, t in table):
        raise InputError(
            f"seconds of {what} need ascending rows and times that are finite and not negative, got {shown(table)}"
        )


def check_tables(seconds: object) -> None:
    """InputError where an entry of `seconds`, tables by kind and stage, is written otherwise: says how to write it."""
    if not isinstance(seconds, Mapping):
        return
    for key, table in seconds.items():
        if not (isinstance(key, tuple) and len(key) == 2):
            raise InputError(
                f"seconds are listed by kind and stage, as in {{(Kind.F, 0): ((1, 0.01),)}}; got the key {shown(key)}"
            )
        if isinstance(table, Real):
            raise InputError(
                f"seconds of {key[0]}{key[1]} need a table of (rows, seconds), got {shown(table)}; for the same time "
                f"whatever the rows write (({0 if key[0] == Kind.STEP else 1}, {shown(table)}),)"
            )
