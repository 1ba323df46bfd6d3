"""Ranks leave no resources behind, also if they are killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_semaphore_is_left() -> None:
    """No semaphore is left, because otherwise the resource tracker of Python would print a warning when it ends."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.testing.killed"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (found.returncode, found.stderr) == (0, "")
