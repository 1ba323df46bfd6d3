"""Ranks end without a trace, in whatever way they end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from lightning_pipes.testing import ranks

ROOT = Path(__file__).parents[2]
KEPT: list[Any] = []


def with_lock(rank: int) -> None:
    """Makes what a progress bar makes, and does not free it; one rank is killed."""
    KEPT.append(multiprocessing.RLock())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    ranks.PRELOAD.remove("lightning.pytorch")  # it takes seconds to import
    outcomes = ranks.watch_ranks(with_lock, 2, timeout=60)
    assert [o.exitcode for o in outcomes] == [0, -signal.SIGKILL], outcomes


def test_no_semaphore_is_left() -> None:
    """The tracker of resources would say so when it ends, and remove it."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.testing.test_ranks"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (found.returncode, found.stderr) == (0, "")
