"""Ranks of a benchmark that measures the engine without a Trainer."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from benchmarks.harness.emulated import request_realtime_priority
from lightning_pipes.engine import FailureWatch


def join_ranks(rank: int, ranks: int | None = None, realtime: bool = True) -> FailureWatch:
    """Join the other ranks over gloo, and return the watch over them.

    Args:
        realtime: whether this process asks for real-time priority first, so that other programs are not measured. That
            is for layers that sleep. Real ones that keep all cores busy would make helper threads wait for their turn.
    """
    if realtime:
        request_realtime_priority()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    store = dist.distributed_c10d._get_default_store()
    return FailureWatch(store, rank) if ranks is None else FailureWatch(store, rank, ranks)
