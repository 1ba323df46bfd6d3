"""Tests that run the rows of the compatibility table with every module cut by units."""

from __future__ import annotations

import pytest

from tests.compat.cases import found_by, lost_by_units, verify_by_units
from tests.compat.rows import BY_UNITS, ROWS

LOST = lost_by_units()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not row.not_yet])
def test_row_by_units(name: str) -> None:
    """Check the results of a row on two processes, unless the list has it. The list may only become shorter."""
    if lacks := ROWS[name].lacks():
        pytest.skip(lacks)
    found = found_by(name, BY_UNITS, 2)
    if name not in LOST:
        verify_by_units(name, found)
        return
    try:
        verify_by_units(name, found)
    except AssertionError:
        return
    pytest.fail(f"{name!r} works by units: remove it from tests/compat/lost_by_units.txt")


def test_the_list_has_reasons_and_no_other_rows() -> None:
    assert all(LOST.values())
    assert LOST.keys() <= ROWS.keys()
