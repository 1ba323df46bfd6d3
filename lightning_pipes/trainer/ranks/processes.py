"""All processes of a run, also while torch's default process group is that of the replicas; see `replica_world`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_pipes.trainer import private_lightning as private


def whole_group() -> Any:
    """Return the process group of all processes; None before it is made."""
    group = private.default_group()
    return getattr(group, "whole", group)


def process_rank() -> int:
    """Return the global rank of this process."""
    rank: int = whole_group().rank()
    return rank


@contextmanager
def all_processes() -> Iterator[None]:
    """Let torch's default process group be that of all processes in the block, as for making other groups."""
    before = private.default_group()
    private.set_default_group(whole_group())
    try:
        yield
    finally:
        private.set_default_group(before)
