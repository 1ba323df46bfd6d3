"""Tests that compare the outcome of every row with docs/compatibility.md, and the document with the rows."""

from __future__ import annotations

from typing import Any

import pytest

from tests.compat.cases import COLUMNS, found_by, is_slow, result, verify
from tests.compat.rows import ROWS
from tests.compat.table import PATH, table, written


def marked(schedule: str, ranks: int) -> list[Any]:
    """Return test cases for all rows in one column.

    In the first column, about one of ten rows is a fast test. All other rows and columns are slow tests. Rows with
    `not_yet` are expected to fail.
    """
    cases = []
    for name, row in ROWS.items():
        slow = [] if (schedule, ranks) == COLUMNS[0] and not is_slow(name) else [pytest.mark.slow]
        late = [pytest.mark.xfail(reason=row.reason, strict=True, raises=AssertionError)] if row.not_yet else []
        cases.append(pytest.param(name, schedule, ranks, id=f"{name}, {schedule} on {ranks}", marks=[*slow, *late]))
    return cases


@pytest.mark.parametrize(("name", "schedule", "ranks"), [case for column in COLUMNS for case in marked(*column)])
def test_row(name, schedule, ranks):
    """Check the results of a row, and its outcome against the document."""
    if lacks := ROWS[name].lacks():
        pytest.skip(lacks)
    found = found_by(name, schedule, ranks)
    verify(name, found)
    assert written()[name][schedule, ranks] in ("", result(name, found)), "run: python -m tests.compat.table"


def test_the_document_has_these_rows():
    """Check that the document has the rows, the order and the counts of the registry."""
    assert PATH.read_text() == table(written()), "run: python -m tests.compat.table"


def test_rows_of_the_fast_tests_have_results():
    """Check that the document has an outcome for every row of the fast tests."""
    results = written()
    assert all(results[name][COLUMNS[0]] for name in ROWS if not is_slow(name))
