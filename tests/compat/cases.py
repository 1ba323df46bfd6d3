"""Rows of the compatibility table, run with a schedule on so many processes, and what came of it."""

from __future__ import annotations

from functools import cache
from tempfile import TemporaryDirectory

from lightning_pipes.testing.ranks import RanksFailedError, run_ranks
from tests.compat.rows import ROWS, SCHEDULES
from tests.compat.runs import Found, Row, compare, on_a_rank, on_one_process

Column = tuple[str, int]
"""A schedule and a number of processes."""
COLUMNS: list[Column] = [(schedule, ranks) for ranks in (2, 4) for schedule in SCHEDULES]
WORKS, WARNED, REFUSED, FAILS = "works", "warned", "refused", "fails"

plain_run = cache(lambda name: on_one_process(ROWS[name]))


def is_slow(name: str) -> bool:
    """Whether a row is left to the slow tests: nine of ten, and what takes long."""
    return ROWS[name].slow or list(ROWS).index(name) % 10 != 0


@cache
def together(schedule: str, ranks: int, area: str, slow: bool) -> dict[str, list[Found]]:
    """What each rank found, by row; the rows of an area that should work share processes until one fails."""
    names = [
        name
        for name, row in ROWS.items()
        if row.area == area and not row.not_yet and not row.lacks() and is_slow(name) == slow
    ]
    found: dict[str, list[Found]] = {}
    while left := [name for name in names if name not in found]:
        try:
            found.update(launch(left, schedule, ranks))
        except RanksFailedError as error:  # no end, most likely; the rest would take as long
            found.update({name: [{"error": str(error)}] * ranks for name in left})
    return found


def launch(names: list[str], schedule: str, ranks: int) -> dict[str, list[Found]]:
    """What each rank found, by row, up to the first row that ends with an error."""
    rows = sum(150 if ROWS[name].slow else 5 for name in names)  # seconds a rank: ten times what quiet cores need
    with TemporaryDirectory() as folder:
        timeout = ranks * (15 + rows)
        by_rank = run_ranks(on_a_rank, ranks, names, SCHEDULES[schedule], ranks, folder, timeout=timeout)
    return {name: list(found) for name, *found in zip(names, *by_rank, strict=False)}


def found_by(name: str, schedule: str, ranks: int) -> list[Found]:
    """What each rank found of one row."""
    row = ROWS[name]
    if row.not_yet:
        return launch([name], schedule, ranks)[name]
    return together(schedule, ranks, row.area, is_slow(name))[name]


def verify(name: str, ranks: list[Found]) -> None:
    """Asserts that the ranks found what the plain run did, or failed as the row says."""
    row = ROWS[name]
    refused = row.refused or row.refused_on.get(len(ranks), "")
    plain = {} if refused else plain_run(name)
    message = refused or row.raises
    if message:
        errors = [found.get("error", "no error") for found in ranks]
        assert all(message in error for error in errors), errors
    if row.raises:
        assert message in plain.get("error", "no error")
    elif row.warned:
        assert not any(map(ended_early, ranks)), ranks
        assert any(row.warned in text for found in ranks for text in found["warnings"])
    elif not refused:
        assert "error" not in plain, plain["error"]
        assert compare(row, ranks, plain) == []
    row.check(ranks, plain)


def result(name: str, ranks: list[Found]) -> str:
    """How a row ended: by what the ranks found, whatever the row says of itself."""
    try:
        verify(name, ranks)
    except AssertionError:
        return FAILS
    if all(map(ended_early, ranks)) and not _ends_alike(ROWS[name]):
        return REFUSED
    return WARNED if ROWS[name].warned else WORKS


def ended_early(found: Found) -> bool:
    """Whether the run on a rank ended with an error."""
    return "error" in found


def _ends_alike(row: Row) -> bool:
    """Whether one process ends with an error, too."""
    return bool(row.raises)
