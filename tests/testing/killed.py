"""A script that runs two ranks and kills one of them. Remaining resources are reported when it ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

from lightning_pipes.testing import ranks

KEPT: list[Any] = []


def with_lock(rank: int) -> None:
    """Create a lock, as a progress bar does, without freeing it. Rank 1 then kills itself."""
    KEPT.append(multiprocessing.RLock())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    ranks.PRELOADED_MODULES.remove("lightning.pytorch")  # it takes seconds to import
    outcomes = ranks.watch_ranks(with_lock, 2, timeout=60)
    assert [o.exitcode for o in outcomes] == [0, -signal.SIGKILL], outcomes
