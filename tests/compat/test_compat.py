"""Every row of docs/compatibility.md, and the document itself."""

from __future__ import annotations

from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from lightning_pipes.testing.ranks import RanksFailedError, run_ranks
from tests.compat.rows import ROWS, SCHEDULES
from tests.compat.runs import Found, Row, compare, on_a_rank, on_one_process
from tests.compat.table import PATH, table

plain_run = cache(lambda name: on_one_process(ROWS[name]))


def is_slow(name: str) -> bool:
    """Whether a row is left to those who have time: every second one."""
    return list(ROWS).index(name) % 2 == 1


@cache
def together(schedule: str, ranks: int, area: str, slow: bool) -> dict[str, list[Found]]:
    """What each rank found, by row; the rows of an area that should work share processes until one fails."""
    names = [n for n, row in ROWS.items() if row.area == area and not row.not_yet and is_slow(n) == slow]
    found: dict[str, list[Found]] = {}
    while left := [name for name in names if name not in found]:
        try:
            found.update(launch(left, schedule, ranks))
        except RanksFailedError as error:  # no end, most likely; the rest would take as long
            found.update({name: [{"error": str(error)}] * ranks for name in left})
    return found


def launch(names: list[str], schedule: str, ranks: int) -> dict[str, list[Found]]:
    with TemporaryDirectory() as folder:
        by_rank = run_ranks(on_a_rank, ranks, names, SCHEDULES[schedule], ranks, folder, timeout=30 + 2 * len(names))
    return {name: list(found) for name, *found in zip(names, *by_rank, strict=False)}


def verify(row: Row, ranks: list[Found], plain: Found) -> None:
    """Asserts that the ranks found what the plain run did, or failed as the row says."""
    message = row.refused or row.raises
    if message:
        errors = [found.get("error", "no error") for found in ranks]
        assert all(message in error for error in errors), errors
    if row.raises:
        assert message in plain.get("error", "no error")
    elif not row.refused:
        assert "error" not in plain, plain["error"]
        assert compare(row, ranks, plain) == []
    row.check(ranks, plain)


def marked(schedule: str, ranks: int) -> list[Any]:
    """All rows with this schedule: slow but for half of them with one, and expected to fail where they say so."""
    cases = []
    for name, row in ROWS.items():
        slow = [] if (schedule, ranks) == ("1f1b", 2) and not is_slow(name) else [pytest.mark.slow]
        late = [pytest.mark.xfail(reason=row.reason, strict=True, raises=AssertionError)] if row.not_yet else []
        cases.append(pytest.param(name, schedule, ranks, id=f"{name}, {schedule} on {ranks}", marks=[*slow, *late]))
    return cases


@pytest.mark.parametrize(
    ("name", "schedule", "ranks"),
    [*marked("1f1b", 2), *marked("kfkb", 2), *marked("1f1b", 4), *marked("kfkb", 4)],
)
def test_row(name, schedule, ranks):
    row = ROWS[name]
    found = launch([name], schedule, ranks) if row.not_yet else together(schedule, ranks, row.area, is_slow(name))
    verify(row, found[name], {} if row.refused else plain_run(name))


def test_the_document_is_what_the_rows_say():
    assert PATH.read_text() == table(), "run: python -m tests.compat.table"
