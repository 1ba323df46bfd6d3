"""How many siblings an array has at a time, where memory decides."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch.utilities import rank_zero_info

from lightning_pipes.ir import PlanError

AUTO = "auto"
_PER_STAGE = 2
"""Siblings for each stage that keep all stages busy, as simulated."""


def enough_siblings(stages: int) -> int:
    """As many as keep all stages busy."""
    return _PER_STAGE * stages


def pieces(stages: int, siblings: int) -> int:
    """In how many micro-batches each of so many siblings cuts its batches: as few as keep all stages busy."""
    return -(-enough_siblings(stages) // siblings)


def decided_size(rooms: Sequence[int], stages: int) -> int:
    """As many siblings as are of use on so many stages and all ranks have room for, S V-B1 of ArrayPipe; it is logged.

    Args:
        rooms: states for which each rank has room.

    Raises:
        PlanError: a rank has no room for two.
    """
    fits, useful = min(rooms), enough_siblings(stages)
    if fits < 2:
        raise PlanError(
            f"the host of rank {rooms.index(fits)} has room for the states of {fits} sibling, and an array needs two. "
            "Raise MemorySwap's host_bytes, or cut the model into more stages"
        )
    size = min(fits, useful)
    rank_zero_info(
        f"JobArray: {size} siblings at a time, for {useful} keep {stages} stages busy, and the host of rank "
        f"{rooms.index(fits)} has room for the states of {fits}"
    )
    return size
