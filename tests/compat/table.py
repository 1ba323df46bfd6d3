"""Writes docs/compatibility.md from the rows: `python -m tests.compat.table`."""

from __future__ import annotations

from pathlib import Path

from tests.compat.rows import ROWS, SCHEDULES
from tests.compat.runs import Row

PATH = Path(__file__).parents[2] / "docs" / "compatibility.md"

HEAD = """# Compatibility

Every row is a test: the same training in a pipeline and in one plain process, and all of it must agree: weights,
losses, logged rows, learning rates, `callback_metrics`, steps and epochs, and what the feature itself makes, such as
checkpoints. Numbers agree to 1e-10 in double precision unless a row says otherwise.

*works*: agrees. *refused*: ends with an error that says why. *not yet*: the test is expected to fail, and says so when
that changes. All schedules: {schedules}, on 2 and on 4 processes.

Written by `python -m tests.compat.table`.
"""


def table() -> str:
    """The text of docs/compatibility.md."""
    lines = [HEAD.format(schedules=", ".join(SCHEDULES))]
    counts = {s: sum(row.status == s for row in ROWS.values()) for s in ("works", "refused", "not yet")}
    lines.append(", ".join(f"{n} {status}" for status, n in counts.items()) + ".\n")
    for area in dict.fromkeys(row.area for row in ROWS.values()):
        lines += [f"## {area}\n", "| feature | status | schedules | notes |", "| --- | --- | --- | --- |"]
        lines += [_line(row) for row in ROWS.values() if row.area == area]
        lines.append("")
    return "\n".join(lines)


def _line(row: Row) -> str:
    schedules = row.strategy.removeprefix("pipeline_") if isinstance(row.strategy, str) else "all"
    notes = [row.reason] if row.reason else []
    if isinstance(row.strategy, dict) and row.strategy.get("microbatches") == 1:
        notes.append("compared with microbatches=1")
    if row.tolerance > 1e-10:
        notes.append(f"agrees to {row.tolerance:g}")
    return f"| {row.name} | {row.status} | {schedules} | {'; '.join(notes)} |"


if __name__ == "__main__":
    PATH.write_text(table())
