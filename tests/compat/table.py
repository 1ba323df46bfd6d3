"""Runs the rows and writes what came of it to docs/compatibility.md:

    python -m tests.compat.table [SCHEDULE RANKS [AREA ...]]

Without arguments all columns, else one, or some areas of it; what was not run again stays as it was written.
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
"""By row and column."""

HEAD = """# Compatibility

Every row is a test: the same training in a pipeline and in one plain process, and all of it must agree: weights,
losses, logged rows, learning rates, `callback_metrics`, steps and epochs, and what the feature itself makes, such as
checkpoints. Numbers agree to 1e-10 in double precision unless a row says otherwise.

Each cell is what came of a run with that schedule on so many processes. *works*: agrees. *refused*: ends on every rank
with the error that the row waits for, which says why. *warned*: trains something else, and a warning says what and
why. *fails*: anything else. An empty cell was not run.

Written by `python -m tests.compat.table`, which runs all of them; `make test` runs half of the first column, and
`make test-full` all, against what is written here.
"""


def table(results: Results) -> str:
    """The text of docs/compatibility.md."""
    counts = Counter(cell for row in ROWS for cell in results.get(row, {}).values())
    lines = [HEAD]
    lines.append(
        f"{len(ROWS)} rows: " + ", ".join(f"{counts[s]} cells {s}" for s in (WORKS, WARNED, REFUSED, FAILS)) + ".\n"
    )
    names = [f"{schedule}, {ranks}" for schedule, ranks in COLUMNS]
    for area in dict.fromkeys(row.area for row in ROWS.values()):
        lines += [f"## {area}\n", f"| feature | {' | '.join(names)} | notes |", "| --- |" + " --- |" * (len(names) + 1)]
        lines += [_line(row, results.get(row.name, {})) for row in ROWS.values() if row.area == area]
        lines.append("")
    return "\n".join(lines)


def _line(row: Row, cells: dict[Column, str]) -> str:
    notes = [row.reason] if row.reason else []
    if isinstance(row.strategy, str):
        notes.append(f"{row.strategy.removeprefix('pipeline_')} in every column")
    if isinstance(row.strategy, dict) and "schedule" in row.strategy:
        notes.append(f"{row.strategy['schedule']} in every column")
    if isinstance(row.strategy, dict) and row.strategy.get("microbatches") == 1:
        notes.append("compared with microbatches=1")
    if row.tolerance > 1e-10:
        notes.append(f"agrees to {row.tolerance:g}")
    return f"| {row.name} | {' | '.join(cells.get(column, '') for column in COLUMNS)} | {'; '.join(notes)} |"


def written() -> Results:
    """What docs/compatibility.md says."""
    found: Results = {}
    for line in PATH.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == len(COLUMNS) + 2 and cells[0] in ROWS:
            found[cells[0]] = dict(zip(COLUMNS, cells[1:-1], strict=True))
    return found


def run(columns: list[Column], areas: list[str]) -> None:
    """Runs all rows of these areas in these columns, and writes the document after every area."""
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
