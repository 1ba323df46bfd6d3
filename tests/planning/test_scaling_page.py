"""Check that benchmarks/SCALING.md shows the current results of the planner."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_is_up_to_date():
    from benchmarks import scaling

    page = (ROOT / "benchmarks" / "SCALING.md").read_text().splitlines()
    for line in scaling.by_stages(scaling.CASES[2], most=8):
        assert line in page, "run benchmarks/scaling.py and paste its tables"
