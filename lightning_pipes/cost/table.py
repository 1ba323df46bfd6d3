"""Tables of seconds by number of rows, and their conversion to nanoseconds."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from numbers import Real

from lightning_pipes.cost.links import LONGEST
from lightning_pipes.ir import InputError, Kind, short_repr

Table = tuple[tuple[int, float], ...]
"""(rows, seconds), rows ascending."""


def at_rows(table: Table, rows: int) -> float:
    """Return `table` at `rows`: linear, also beyond its ends, and never negative; 0 for an empty table."""
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
    """Return the nearest whole number of nanoseconds.

    Raises:
        InputError: the time is too long to simulate.
    """
    if not seconds < LONGEST:
        raise InputError(f"{seconds:g} s is too long to simulate; check the units, and look for a slow link")
    return round(seconds * 1e9)


def check_table(what: str, table: Table) -> None:
    """Raise InputError unless rows ascend and times are finite and not negative; `what` names the table."""
    rows = [r for r, _ in table]
    if not table or rows != sorted(set(rows)) or not all(0 <= t < math.inf for _, t in table):
        raise InputError(
            f"seconds of {what} need ascending rows and times that are finite and not negative, got {short_repr(table)}"
        )


def check_tables(seconds: object) -> None:
    """Raise InputError where an entry of `seconds` has another form than a table by kind and stage; the error shows the
    right form."""
    if not isinstance(seconds, Mapping):
        return
    for key, table in seconds.items():
        if not (isinstance(key, tuple) and len(key) == 2):
            raise InputError(
                f"seconds are listed by kind and stage, as in {{(Kind.F, 0): ((1, 0.01),)}}; got the key "
                f"{short_repr(key)}"
            )
        if isinstance(table, Real):
            raise InputError(
                f"seconds of {key[0]}{key[1]} need a table of (rows, seconds), got {short_repr(table)}; for the same "
                "time "
                f"whatever the rows write (({0 if key[0] == Kind.STEP else 1}, {short_repr(table)}),)"
            )
