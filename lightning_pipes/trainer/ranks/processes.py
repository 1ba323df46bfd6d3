"""All processes of a run, also while torch's default process group is that of the replicas; see `replica_world`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from lightning_pipes.trainer import private_lightning as private


def whole_group() -> Any:
    """Return the process group of all processes; None before it is made."""
    group = private.default_group()
    return getattr(group, "whole", group)


def process_rank() -> int:
    """Return the global rank of this process."""
    rank: int = whole_group().rank()
    return rank


_made: WeakSet[Any] = WeakSet()
"""Process groups that were made in `all_processes`."""


@contextmanager
def all_processes() -> Iterator[None]:
    """Let torch's default process group be that of all processes in the block, as for making other groups."""
    before, known = private.default_group(), private.process_groups()
    private.set_default_group(whole_group())
    try:
        yield
    finally:
        private.set_default_group(before)
        _made.update(set(private.process_groups()).difference(known))


def user_groups() -> set[Any]:
    """Return the process groups that the user's code has made."""
    return {group for group in private.process_groups() if is_user_group(group)}


def is_user_group(group: Any) -> bool:
    """Return whether the user's code has made a process group."""
    return group not in _made and group is not private.default_group() and group is not whole_group()
