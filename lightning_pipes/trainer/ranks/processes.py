"""All processes of a run, even if torch's default process group consists of the replicas; see `replica_world`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch.distributed as dist

from lightning_pipes.trainer import private_lightning as private


def whole_group() -> Any:
    """Return the process group of all processes; None before it is created."""
    group = dist.group.WORLD
    return getattr(group, "whole", group)


def process_rank() -> int:
    """Return the global rank of this process."""
    rank: int = whole_group().rank()
    return rank


_made: WeakSet[Any] = WeakSet()
"""The process groups that were created in `all_processes`."""


@contextmanager
def all_processes() -> Iterator[None]:
    """Make the group of all processes torch's default process group in the block, for example to create other
    groups."""
    before, known = dist.group.WORLD, private.process_groups()
    dist.group.WORLD = whole_group()
    try:
        yield
    finally:
        dist.group.WORLD = before
        _made.update(set(private.process_groups()).difference(known))


def user_groups() -> set[Any]:
    """Return the process groups that were created by the user's code."""
    return {group for group in private.process_groups() if is_user_group(group)}


def is_user_group(group: Any) -> bool:
    """Return whether a process group was created by the user's code."""
    return group not in _made and group is not dist.group.WORLD and group is not whole_group()
