"""Run rows of the compatibility table with a schedule on a number of processes, and verify their results."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from lightning_pipes.testing.ranks import RanksFailedError, run_ranks
from tests.compat.rows import ROWS, SCHEDULES, SETTINGS
from tests.compat.runs import Found, Row, compare, on_a_rank, on_one_process

Column = tuple[str, int]
"""A name in `SETTINGS`, such as a schedule, and a number of processes."""
COLUMNS: list[Column] = [(schedule, ranks) for ranks in (2, 4) for schedule in SCHEDULES]
WORKS, WARNED, REFUSED, FAILS = "works", "warned", "refused", "fails"

WARNINGS_BY_UNITS = ("training_step trains differently in micro-batches", "training_step sets ")
"""Warnings that name the step, in place of warnings that name a layer or the code in front of the layers."""

LOST_BY_UNITS = Path(__file__).with_name("lost_by_units.txt")

ALWAYS = ("a copied Trainer", "storage_options of save_checkpoint")
"""Rows that also belong to the fast tests, because no other fast test checks the same."""

plain_run = cache(lambda name: on_one_process(ROWS[name]))


def lost_by_units() -> dict[str, str]:
    """Return the reasons why rows do not work if every module is cut by units, by row."""
    found, reason = {}, ""
    for line in LOST_BY_UNITS.read_text().splitlines():
        if line.startswith("# "):
            reason = line[2:]
        elif line:
            found[line] = reason
    return found


def is_slow(name: str) -> bool:
    """Return whether only the slow tests run a row: nine of ten rows, and the rows that take long."""
    return ROWS[name].slow or (name not in ALWAYS and list(ROWS).index(name) % 10 != 0)


@cache
def together(schedule: str, ranks: int, area: str, slow: bool) -> dict[str, list[Found]]:
    """Return the results of each rank, by row, for the rows of an area that are not expected to fail.

    The rows share processes. After a row that ends with an error, the remaining rows run in new processes.
    """
    names = [
        name
        for name, row in ROWS.items()
        if row.area == area and not row.not_yet and not row.lacks() and is_slow(name) == slow
    ]
    found: dict[str, list[Found]] = {}
    while left := [name for name in names if name not in found]:
        try:
            found.update(launch(left, schedule, ranks))
        except RanksFailedError as error:  # probably a timeout, which the remaining rows could repeat
            found.update({name: [{"error": str(error)}] * ranks for name in left})
    return found


def launch(names: list[str], schedule: str, ranks: int) -> dict[str, list[Found]]:
    """Run rows in new processes, and return the results of each rank by row.

    The rows after the first one that ends with an error are not run, and have no results.
    """
    rows = sum(150 if ROWS[name].slow else 5 for name in names)  # seconds per rank: ten times the need of idle cores
    with TemporaryDirectory() as folder:
        timeout = ranks * (15 + rows)
        by_rank = run_ranks(on_a_rank, ranks, names, SETTINGS[schedule], ranks, folder, timeout=timeout)
    return {name: list(found) for name, *found in zip(names, *by_rank, strict=False)}


def found_by(name: str, schedule: str, ranks: int) -> list[Found]:
    """Return the results of each rank for one row."""
    row = ROWS[name]
    if row.not_yet:
        return launch([name], schedule, ranks)[name]
    return together(schedule, ranks, row.area, is_slow(name))[name]


def verify(name: str, ranks: list[Found], row: Row | None = None) -> None:
    """Assert that the ranks got the results of the plain run, or the error or warning that the row specifies.

    Args:
        name: the name of the row.
        ranks: the results of each rank.
        row: what to expect; by default, what the row specifies.
    """
    row = row or ROWS[name]
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


def verify_by_units(name: str, ranks: list[Found]) -> None:
    """Assert the same as `verify` for a module that is cut by units.

    A row that is refused or warned about if the module is cut by layers may also be refused for another reason, or get
    the results of the plain run. A row that is warned about may also get one of `WARNINGS_BY_UNITS`.
    """
    row = ROWS[name]
    found = [text for of_rank in ranks for text in of_rank.get("warnings", ())]
    if row.warned and not any(row.warned in text for text in found):
        row = replace(row, warned=next((w for w in WARNINGS_BY_UNITS if any(w in text for text in found)), row.warned))
    equal = replace(row, refused="", refused_on={}, warned="")
    is_refused = all(re.search("(Pipeline|Plan)Error: ", found.get("error", "")) for found in ranks)
    try:
        verify(name, ranks, row)
    except AssertionError:
        if row == equal:
            raise
        if not is_refused:
            verify(name, ranks, equal)


def result(name: str, ranks: list[Found]) -> str:
    """Return the outcome of a row: works, warned, refused or fails."""
    try:
        verify(name, ranks)
    except AssertionError:
        return FAILS
    if all(map(ended_early, ranks)) and not _ends_alike(ROWS[name]):
        return REFUSED
    return WARNED if ROWS[name].warned else WORKS


def ended_early(found: Found) -> bool:
    """Return whether the run on a rank ended with an error."""
    return "error" in found


def _ends_alike(row: Row) -> bool:
    """Return whether the row specifies that the plain run ends with an error, too."""
    return bool(row.raises)
