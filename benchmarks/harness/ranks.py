"""Setup of ranks for benchmarks that measure the engine without a Trainer."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from benchmarks.harness.emulated import request_realtime_priority
from lightning_pipes.engine import FailureWatch


def join_ranks(rank: int, ranks: int | None = None, realtime: bool = True) -> FailureWatch:
    """Join the other ranks over gloo, and return the failure watch of this rank.

    Args:
        rank: this rank.
        ranks: the number of ranks for `FailureWatch`, or None for its default.
        realtime: whether this process first requests real-time priority, so that other programs do not affect the
            measurement. Use it for layers that sleep. With real layers, which keep all cores busy, helper threads would
            have to wait for a core.
    """
    if realtime:
        request_realtime_priority()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    store = dist.distributed_c10d._get_default_store()
    return FailureWatch(store, rank) if ranks is None else FailureWatch(store, rank, ranks)
