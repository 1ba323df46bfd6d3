"""Warnings about state that steps and hooks set in runs that do not merge it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import is_

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn

from lightning_pipes.ir import PipelineError
from lightning_pipes.trainer.results.merging import Path, format_path
from lightning_pipes.trainer.results.module_entries import (
    MISSING,
    Content,
    entry_values,
    have_same_entries,
    is_state_tensor,
    tensor_version,
)

N_WATCHED_STEPS = 8
"""The number of steps that are watched."""


class EntryWatch:
    """Watches the state that steps and hooks set in the first steps of a run without merging.

    Args:
        module: the user's module.
        read_objects: returns the entries of all objects with merged changes, by their paths.
    """

    def __init__(self, module: pl.LightningModule, read_objects: Callable[[], dict[Path, Content]]) -> None:
        self._module, self._read_objects = module, read_objects
        self._schedule, self._alone, self._watched, self._watched_hooks = "", True, 0, 0
        self._why_refused = ""

    def expect_overlap(self, schedule: str, alone: bool) -> None:
        """Watch the first steps, because batches overlap with this schedule and their changes are not merged.

        Args:
            schedule: the name of the schedule, for warnings.
            alone: whether this rank is the only one of its pipeline.
        """
        self._schedule, self._alone = schedule, alone
        self._watched = self._watched_hooks = N_WATCHED_STEPS

    def refuse_changes(self, why: str) -> None:
        """Watch the first steps and refuse changes of the state, because no rank has the state of a whole batch.

        Args:
            why: the reason and a way out, for the message.
        """
        self._why_refused, self._watched = why, N_WATCHED_STEPS

    @contextmanager
    def watch_step(self, cut: bool) -> Iterator[None]:
        """Warn of entries that a step in the block sets, if batches overlap.

        Args:
            cut: whether the step runs on a part of its batch.

        Raises:
            PipelineError: the step sets an entry, and changes are refused.
        """
        if not self._watched or (self._alone and not cut and not self._why_refused):
            yield
            return
        self._watched -= 1
        with self._watch_entries(cut) as found:
            yield
        if found and self._why_refused:
            raise PipelineError(f"{type(self._module).__name__}.training_step sets {found[0]}, and {self._why_refused}")
        if found:
            self._watched = 0
            rank_zero_warn(
                f"{type(self._module).__name__}.training_step sets {found[0]}. Batches overlap with schedule "
                f"{self._schedule!r}, so each micro-batch sets it, and other ranks have it only after a flush, as "
                "before validation and at the end of an epoch. Set it in a hook, or use a schedule that flushes "
                "between batches, such as '1f1b'"
            )

    @contextmanager
    def watch_step_hooks(self) -> Iterator[None]:
        """Warn of entries that hooks in the block set, before the optimizer step of an overlapping batch."""
        if not self._watched_hooks or self._alone:
            yield
            return
        self._watched_hooks -= 1
        with self._watch_entries(cut=True) as found:
            yield
        if found:
            self._watched_hooks = 0
            rank_zero_warn(
                f"a hook of {type(self._module).__name__} or of a callback that runs before the optimizer's step, as "
                f"on_before_optimizer_step, sets {found[0]}. Batches overlap with schedule {self._schedule!r}, so "
                "each rank sets it when it steps, and steps of later batches may have begun before. Set it in "
                "on_train_batch_start, or use a schedule that flushes between batches, such as '1f1b'"
            )

    @contextmanager
    def _watch_entries(self, cut: bool) -> Iterator[list[str]]:
        """Watch the state in the block.

        Yields:
            A list that contains, after the block, the name of an entry that was set, if there is one.
        """
        before = self._read_objects()
        tensors = [t for content in before.values() for t in entry_values(content) if is_state_tensor(t)]
        versions = [(t, tensor_version(t)) for t in tensors]
        found: list[str] = []
        yield found
        written = {id(t) for t, version in versions if tensor_version(t) != version}
        names = (
            _set_entry(path, before.get(path), after, written, cut) for path, after in self._read_objects().items()
        )
        found += [name for name in names if name][:1]


def _set_entry(path: Path, before: Content | None, after: Content, written: set[int], cut: bool) -> str:
    """Return the name of an entry that has changed; empty if there is none.

    A list that has only grown counts as unchanged, unless the step runs on a part of its batch.
    """
    if before is None:
        return ""
    if isinstance(after, dict):
        assert isinstance(before, dict)
        for key, value in after.items():
            if before.get(key, MISSING) is not value or id(value) in written:
                return format_path((*path, (".", key)))
        return ""
    grown = isinstance(after, list) and len(after) >= len(before) and all(map(is_, before, after))
    if have_same_entries(after, before) or (grown and not cut):
        return ""
    return format_path(path)
