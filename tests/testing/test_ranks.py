"""Ranks leave no resources behind, also if they are killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


SEEDED = """
import os

os.environ["PL_GLOBAL_SEED"] = "3"  # as lightning.seed_everything(3) does
from lightning_pipes.testing.ranks import run_ranks
from tests.testing.seeds import find_seed

print(run_ranks(find_seed, 1))
"""


def test_ranks_do_not_inherit_a_seed_from_earlier_tests() -> None:
    """Start the fork server after seed_everything, as it happens if an earlier test of the process calls it."""
    found = subprocess.run([sys.executable, "-c", SEEDED], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert found.stdout == "[None]\n", found.stderr


def test_no_semaphore_is_left() -> None:
    """No semaphore is left, because otherwise the resource tracker of Python would print a warning when it ends."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.testing.killed"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (found.returncode, found.stderr) == (0, "")
