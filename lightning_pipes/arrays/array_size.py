"""How many siblings an array has at a time, where memory decides."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch.utilities import rank_zero_info

from lightning_pipes.ir import PlanError

AUTO = "auto"
_PER_STAGE = 2
"""Siblings for each stage that keep all stages busy, as simulated."""


def count_useful_siblings(stages: int) -> int:
    """Return the number of siblings that keep all stages busy."""
    return _PER_STAGE * stages


def choose_microbatches(stages: int, siblings: int) -> int:
    """Return the micro-batches of a batch with so many siblings: as few as keep all stages busy."""
    return -(-count_useful_siblings(stages) // siblings)


def choose_size(rooms: Sequence[int], stages: int) -> int:
    """Return the size of an array: the useful siblings that fit on all ranks, S V-B1 of ArrayPipe. The size is logged.

    Args:
        rooms: states for which each rank has room.

    Raises:
        PlanError: a rank has no room for two.
    """
    fits, useful = min(rooms), count_useful_siblings(stages)
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
