"""Ranks end without a trace, in whatever way they end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_semaphore_is_left() -> None:
    """The tracker of resources would say so when it ends, and remove it."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.testing.killed"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (found.returncode, found.stderr) == (0, "")
