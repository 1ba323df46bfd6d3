"""The state of a module as hooks have left it for one of several overlapping batches."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch

from lightning_pipes.engine.compute.footprint import count_bytes
from lightning_pipes.trainer.results.generators import ModuleGenerators
from lightning_pipes.trainer.results.module_entries import (
    Content,
    entry_at,
    entry_values,
    have_same_entries,
    is_state_tensor,
    map_entries,
    read_entries,
    tensor_version,
    write_entries,
)

MAX_COPIED_BYTES_PER_BATCH = 1 << 16
"""The largest size in bytes of a tensor that is copied before each batch, in case it is changed in place.

Larger tensors are copied after they have been changed in place once.
"""


class BatchState:
    """The state that hooks had left when a batch began, for the steps of this batch.

    Hooks of later batches may have run since.

    Args:
        contents: objects with their entries.
        copies: tensors with their versions and values, by id.
        set_by_steps: the entries that steps have set so far, as pairs of object id and key, and the ids of changed
            tensors. Hooks did not set these, so they are left unchanged. The set grows.
        generators: the generators of the module, with their present states.
    """

    def __init__(
        self,
        contents: Sequence[tuple[Any, Content]],
        copies: Mapping[int, tuple[torch.Tensor, int, torch.Tensor]],
        set_by_steps: set[Any],
        generators: ModuleGenerators,
    ) -> None:
        self._generators, self._states = generators, generators.read_states()
        self._contents = contents
        self._copies = copies
        self._set_by_steps = set_by_steps

    @contextmanager
    def restore_entries(self) -> Iterator[None]:
        """Restore the entries of the objects for the block.

        After the block, the objects have their later entries, with the changes that the block has made.
        """
        later_states = self._generators.read_states()
        self._generators.set_states(self._states)
        own = self._set_by_steps
        own_entries = [each for each in own if isinstance(each, tuple)]
        old = {
            key: copy.clone()
            for key, (t, version, copy) in self._copies.items()
            if tensor_version(t) != version and key not in own
        }
        given: list[tuple[Any, Content, Content]] = []
        for thing, kept in self._contents:
            later = read_entries(thing)
            entries = _merge_entries(later, kept, {key for place, key in own_entries if place == id(thing)})
            if old and not isinstance(entries, set):
                entries = map_entries(entries, lambda _, value: old.get(id(value), value))
            if not have_same_entries(entries, later):
                write_entries(thing, entries)
            given.append((thing, entries, later))
        tensors = [t for _, entries, _ in given for t in entry_values(entries) if is_state_tensor(t)]
        versions = [(t, tensor_version(t)) for t in tensors]
        try:
            yield
        finally:
            self._generators.set_states(later_states)
            own.update(id(t) for t, version in versions if tensor_version(t) != version)
            for thing, entries, later in given:
                after = read_entries(thing)
                if not have_same_entries(after, entries):
                    own.update((id(thing), key) for key in _changed_keys(after, entries))
                if after is not entries and not have_same_entries(later, entries):
                    write_entries(thing, _with_changes(later, entries, after))


def _merge_entries(later: Content, kept: Content, own: Collection[Any]) -> Any:
    """Return the entries `later` with the entries of `kept`, except the step's own."""
    if isinstance(later, dict) and isinstance(kept, dict):
        return {**later, **{key: value for key, value in kept.items() if key not in own}}
    return later if None in own else kept


def _changed_keys(after: Content, before: Content) -> list[Any]:
    """Return the keys of entries that differ. None stands for all entries of a list or set."""
    if isinstance(after, dict):
        return [key for key, value in after.items() if entry_at(before, key) is not value]
    return [None]


def _with_changes(later: Content, given: Content, after: Content) -> Content:
    """Return the entries `later` with the changes from `given` to `after`."""
    if isinstance(after, dict) and isinstance(later, dict):
        changed = {key: value for key, value in after.items() if entry_at(given, key) is not value}
        return {**later, **changed}
    if have_same_entries(after, given):
        return later
    grown = isinstance(after, list) and isinstance(later, list) and len(after) >= len(given)
    if grown and all(map(is_, given, after)):
        return [*later, *list(after)[len(given) :]]
    return after


class BatchStateRecorder:
    """Records the state that hooks have left for the steps of each of several overlapping batches.

    Args:
        generators: the generators of the module.
    """

    def __init__(self, generators: ModuleGenerators) -> None:
        self._generators = generators
        self._captured: dict[int, tuple[Any, Content]] = {}
        self._set_by_steps: set[Any] = set()
        self._copies: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        """Copies of small tensors, with their versions."""

    def capture_state(self, things: Iterable[Any]) -> BatchState:
        """Return the present state of these objects. Entries that are the same as before are stored only once."""
        before, self._captured = self._captured, {}
        for thing in things:
            content, known = read_entries(thing), before.get(id(thing))
            if known is not None and have_same_entries(content, known[1]):
                content = known[1]
            self._captured[id(thing)] = thing, content
        tensors = {
            id(t): t
            for _, content in self._captured.values()
            for t in entry_values(content)
            if is_state_tensor(t) and count_bytes(t) <= MAX_COPIED_BYTES_PER_BATCH
        }
        self._copies = {
            key: self._copies[key] if self._is_copied(t) else (t, tensor_version(t), t.detach().clone())
            for key, t in tensors.items()
        }
        return BatchState(list(self._captured.values()), dict(self._copies), self._set_by_steps, self._generators)

    def _is_copied(self, tensor: torch.Tensor) -> bool:
        known = self._copies.get(id(tensor))
        return known is not None and known[0] is tensor and known[1] == tensor_version(tensor)
