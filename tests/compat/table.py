"""Run the rows of the compatibility table and write the outcomes to docs/compatibility.md.

Usage:

    python -m tests.compat.table [SCHEDULE RANKS [AREA ...]]

Without arguments, all columns are run. Otherwise, one column or some of its areas are run, and the other outcomes in
the document are not changed.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from tests.compat.cases import COLUMNS, FAILS, REFUSED, WARNED, WORKS, Column, found_by, result
from tests.compat.rows import ROWS
from tests.compat.runs import Row

PATH = Path(__file__).parents[2] / "docs" / "compatibility.md"
Results = dict[str, dict[Column, str]]
"""Outcomes by row and column."""

HEAD = """# Compatibility

Each line is a test that trains in a pipeline and in one plain process. Weights, losses, logs, learning rates,
`callback_metrics`, steps, epochs and the results of the feature must agree to 1e-10, unless a line has another number.
The runs use {columns}.

- *works*: all values agree.
- *warned*: some values differ, and a warning names them and the reason.
- *refused*: every rank ends with an error that names the reason.

`python -m tests.compat.table` runs all lines and writes this page. `make test` runs a tenth of the lines for the first
column, and `make test-full` runs all of them.
"""


def table(results: Results) -> str:
    """Return the text of docs/compatibility.md, grouped by area and then by outcome.

    Rows with the same outcome in every column form lists. The other rows form a table.
    """
    counts = Counter(cell for row in ROWS for cell in results.get(row, {}).values())
    names = [f"{schedule} on {ranks}" for schedule, ranks in COLUMNS]
    lines = [HEAD.format(columns=f"{', '.join(names[:-1])} and {names[-1]} processes")]
    lines.append(
        f"{len(ROWS)} lines. Runs: " + ", ".join(f"{counts[s]} {s}" for s in (WORKS, WARNED, REFUSED, FAILS)) + ".\n"
    )
    for area in dict.fromkeys(row.area for row in ROWS.values()):
        rows = [row for row in ROWS.values() if row.area == area]
        lines.append(f"## {area}\n")
        for outcome in (WORKS, WARNED, REFUSED, FAILS):
            alike = [row for row in rows if _cells(row, results) == (outcome,) * len(COLUMNS)]
            lines += [f"{outcome.capitalize()}:\n", *map(_item, alike), ""] if alike else []
            rows = [row for row in rows if row not in alike]
        if rows:
            lines += [f"| feature | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
            lines += [f"| {_item(row)[2:]} | {' | '.join(_cells(row, results))} |" for row in rows] + [""]
    return "\n".join(lines)


def _cells(row: Row, results: Results) -> tuple[str, ...]:
    return tuple(results.get(row.name, {}).get(column, "") for column in COLUMNS)


def _item(row: Row) -> str:
    notes = [row.reason] if row.reason else []
    if isinstance(row.strategy, str):
        notes.append(row.strategy.removeprefix("pipeline_"))
    if isinstance(row.strategy, dict) and "schedule" in row.strategy:
        notes.append(str(row.strategy["schedule"]))
    if isinstance(row.strategy, dict) and row.strategy.get("microbatches") == 1:
        notes.append("microbatches=1")
    if row.tolerance > 1e-10:
        notes.append(f"{row.tolerance:g}")
    return f"- {row.name}" + (f" ({'; '.join(notes)})" if notes else "")


def written() -> Results:
    """Return the outcomes in docs/compatibility.md."""
    found: Results = {}
    names = {_item(row)[2:]: row.name for row in ROWS.values()}
    outcome = ""
    for line in PATH.read_text().splitlines():
        if line[:-1].lower() in (WORKS, WARNED, REFUSED, FAILS):
            outcome = line[:-1].lower()
        elif line.startswith("- ") and line[2:] in names:
            found[names[line[2:]]] = dict.fromkeys(COLUMNS, outcome)
        elif line.startswith("| "):
            item, *cells = (cell.strip() for cell in line.strip("|").rsplit(" | ", len(COLUMNS)))
            if item in names:
                found[names[item]] = dict(zip(COLUMNS, cells, strict=True))
    return found


def run(columns: list[Column], areas: list[str]) -> None:
    """Run all rows of these areas in these columns, and write the document after every area."""
    for schedule, ranks in columns:
        for area in areas:
            names = [name for name, row in ROWS.items() if row.area == area and not row.lacks()]
            came = {name: result(name, found_by(name, schedule, ranks)) for name in names}
            results = written()
            for name in names:
                results.setdefault(name, {})[schedule, ranks] = came[name]
            PATH.write_text(table(results))
            failed = [name for name in names if came[name] == FAILS]
            print(f"{schedule} on {ranks}: {area}{', fails: ' if failed else ''}{', '.join(failed)}", flush=True)


if __name__ == "__main__":
    wanted = sys.argv[1:]
    everything = [*dict.fromkeys(row.area for row in ROWS.values())]
    run([(wanted[0], int(wanted[1]))] if wanted else COLUMNS, wanted[2:] or everything)
