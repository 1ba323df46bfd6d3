"""The state of a module around its layers, of which every rank has a copy.

It consists of attributes, buffers, lists, dicts and objects. In one process, a step changes this state once per batch.
In a pipeline, the step runs for each micro-batch, and completely on one rank only. Therefore every micro-batch begins
with the state from the start of the batch. The last stage merges the resulting states and sends the result to all
ranks. Their hooks and next steps then find the same state as in one process:

    batch begins    micro-batch 0    micro-batch 1     merged
    n = 4           n = 5            n = 5             n = 5
    losses = [a]    [a, b]           [a, c]            [a, mean(b, c)]
"""

from __future__ import annotations

import functools
import pickle
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.utils import _pytree as pytree
from torchmetrics import Metric

from lightning_pipes.engine.compute.footprint import count_bytes
from lightning_pipes.engine.private_torch import BatchNorm
from lightning_pipes.ir import PipelineError, Span
from lightning_pipes.trainer.data.token_cut import TokenCut
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.results.generators import ModuleGenerators
from lightning_pipes.trainer.results.merging import Path, ValueMerger, format_path
from lightning_pipes.trainer.results.module_entries import (
    HIDDEN_NAMES,
    MISSING,
    Content,
    entry_at,
    entry_values,
    follow_path,
    have_same_entries,
    iterate_entries,
    map_entries,
    read_entries,
    tensor_version,
    view_entries,
    write_entries,
)
from lightning_pipes.trainer.user.remote_tensors import RemoteTensor
from lightning_pipes.trainer.user.unchanged import GENERATOR_TYPES
from lightning_pipes.trainer.user.user_objects import can_change

_MAX_WATCHED_OBJECTS = 10_000
"""The largest number of objects that are watched."""
_MAX_STATE_DEPTH = 8
"""The largest depth of a watched object below the module."""
_MAX_COPIED_BYTES_PER_BATCH = 1 << 16
"""The largest size in bytes of a tensor that is copied before each batch, in case it is changed in place.

Larger tensors are copied after they have been changed in place once.
"""
_MAX_CHECKED_ENTRIES = 256
"""The largest number of entries of a list whose tensors are checked for changes in place."""
_N_COPIED_BATCHES = 2
"""Before this number of batches, all tensors are copied."""
_N_WATCHED_STEPS = 8
"""The number of steps of overlapping batches that are watched."""

Hook = Callable[..., Any]


@dataclass
class _Holder:
    """An object with watched entries.

    Attributes:
        path: the path from the module to the object: keys, and whether each is an attribute.
        thing: the object.
        kept: its entries when the batch began.
        merged: whether each micro-batch begins with these entries, and the results are merged. Otherwise, micro-batches
            change the entries one after another, as in metrics.
        shared: whether layers also have the object.
        tensors: the tensors among the entries that may be changed in place.
        names: the names of the attributes, if the object is a module.
        values: the values of these attributes.
        size: the number of all attributes.
    """

    path: Path
    thing: Any
    kept: Content
    merged: bool
    shared: bool
    tensors: list[torch.Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    size: int = 0

    def remember_entries(self) -> None:
        """Keep the present entries as the entries before the batch."""
        self.kept = read_entries(self.thing)
        if isinstance(self.thing, nn.Module):
            own = vars(self.thing)
            self.names = [name for name in own if name not in HIDDEN_NAMES]
            self.values = [own[name] for name in self.names]
            self.size = len(own)
        self.tensors = []
        if isinstance(self.kept, dict) or len(self.kept) <= _MAX_CHECKED_ENTRIES:
            self.tensors = [t for t in entry_values(self.kept) if _is_tensor(t)]

    def is_unchanged(self) -> bool:
        """Return whether the entries are the same objects as before the batch."""
        thing, kept = self.thing, self.kept
        if isinstance(thing, nn.Module):
            own, buffers = vars(thing), thing._buffers
            if len(own) == self.size and all(map(is_, map(own.get, self.names), self.values)):
                if not buffers:
                    return True
                assert isinstance(kept, dict)
                known = len(self.names) + len(buffers) == len(kept)
                if known and all(map(is_, map(kept.get, buffers), buffers.values())):
                    return True
            return have_same_entries(read_entries(thing), kept)
        return have_same_entries(view_entries(thing), kept)


class _ModuleEntries:
    """The attributes and buffers of several modules, which are all compared at once.

    A comparison of one module after another takes several times as long.

    Args:
        modules: the modules, with their present entries.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._names, self._values = self._read()

    def are_unchanged(self) -> bool:
        """Return whether all modules have the same attributes and buffers, and each is the same object as before."""
        names, values = self._read()
        return names == self._names and all(map(is_, values, self._values))

    def _read(self) -> tuple[list[str], list[Any]]:
        tables = [*map(vars, self._modules), *map(attrgetter("_buffers"), self._modules)]
        return [*chain.from_iterable(tables)], [*chain.from_iterable(map(dict.values, tables))]


@dataclass
class _Changed:
    """The entries of a holder that differ from the entries before the batch.

    Attributes:
        path: the path of the holder.
        values: the new entries.
        gone: the keys of removed entries.
        tail: for a list, the index from which its entries are replaced, and the new entries.
        in_place: the keys of tensors that were changed in place.
        on_device: whether a tensor is on a device other than the CPU.
        own: the keys of entries that can't be sent; None if no entry can be sent. Each rank keeps its own entries.
    """

    path: Path
    values: Any = None
    gone: Collection[Any] = ()
    tail: tuple[int, list[Any]] | None = None
    in_place: Collection[Any] = ()
    on_device: bool = False
    own: Collection[Any] | None = ()


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
        tensors = [t for _, entries, _ in given for t in entry_values(entries) if _is_tensor(t)]
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


class ModuleState:
    """The state of a module around its layers on this rank.

    Args:
        module: the module, which is cut.
        layers: the modules of all layers, whose state is handled separately.
        shared: ids of the objects that layers also have.
        device: the device of this rank.
        generators: the generators of the module and its layers.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        layers: Collection[nn.Module],
        shared: Collection[int],
        device: torch.device,
        generators: ModuleGenerators,
    ) -> None:
        self._module = module
        self._skipped = {id(layer) for layer in layers}
        self._shared = frozenset(shared)
        self._device = device
        self.generators = generators
        self._merging = ValueMerger(type(module).__name__)
        self.token_cut: TokenCut | None = None
        """The micro-batches of the current batch, if its samples are in another order than they were loaded."""
        self._holders: list[_Holder] = []
        self._module_entries = _ModuleEntries([])
        self._others: list[int] = []
        """The positions of the holders that `_module_entries` does not contain."""
        self._known: dict[int, tuple[torch.Tensor, int, torch.Tensor | None]] = {}
        self._unstable: set[int] = set()
        self._begun = 0
        self._active = False
        self._clean = True
        self._in_hook = False
        self._overlapping, self._alone, self._watched, self._watched_hooks = "", True, 0, 0
        self._why_refused = ""
        self._statistics: list[tuple[int, list[int]]] = []
        """For each batch norm, the id of its counter and the ids of its buffers.

        torch changes these buffers without new versions.
        """
        self._captured: dict[int, tuple[Any, Content]] = {}
        self._set_by_steps: set[Any] = set()
        self._copies: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        """Copies of small tensors, with their versions, for `capture_state`."""
        self._results: dict[Span, dict[int, Content]] = {}
        self._whole: dict[int, Content] | None = None
        self._refused: set[Path] = set()
        self._walk()
        self._remember()

    # ---- a batch

    def begin_batch(self) -> None:
        """Begin a batch with the present state."""
        self.remember_state()
        self._begun += 1
        self._active = True

    def remember_state(self) -> None:
        """Record the present state. Later changes are determined by comparison with it."""
        changed = [self._holders[index] for index in self._find_changed()]
        if any(map(self._leads_to_others, changed)):
            self._walk()
        else:
            for holder in changed:
                holder.remember_entries()
        if not self._module_entries.are_unchanged():
            self._note_modules()
        written = self._written()
        if changed or written or self._begun <= _N_COPIED_BATCHES:
            self._remember(written)
        self._clean = True

    def restore_state(self, everything: bool = False) -> None:
        """Restore the state from the start of the batch, before the step runs for a micro-batch.

        Args:
            everything: whether to restore state that is never merged, such as metrics, too.
        """
        clean, self._clean = self._clean, False  # the code that runs next may change the state
        if (clean or not self._active) and not everything:
            return
        written = self._written()
        fresh = {
            id(t): t if before is None else before.clone() for t, _, before in self._known.values() if id(t) in written
        }
        for index in self._find_changed():
            holder = self._holders[index]
            if holder.merged or everything:
                write_entries(holder.thing, holder.kept)
        for holder in self._holders if fresh else ():
            has_written = not holder.shared and any(id(t) in fresh for t in holder.tensors)
            if has_written and (holder.merged or everything):
                write_entries(holder.thing, map_entries(holder.kept, lambda _, value: fresh.get(id(value), value)))

    def note_microbatch(self, span: Span) -> None:
        """Record the changes of the step for a micro-batch, on the last stage."""
        if self._active:
            self.generators.note_microbatch(span)
            self._results[span] = found = self._differences(merged=True)
            self._clean = not found

    def note_whole_batch(self, is_exact: bool = True) -> None:
        """Record the changes of a step for the whole batch, for comparison with the merged changes.

        Args:
            is_exact: whether the step drew no random numbers, which would differ from the random numbers of
                micro-batches.
        """
        self._whole = self._differences(merged=True)
        self._merging.is_exact = is_exact

    @property
    def has_results(self) -> bool:
        """Whether the step has changed the state in any micro-batch of the present batch, on the last stage."""
        return any(self._results.values())

    def needs_whole_batch(self) -> bool:
        """Return whether a whole batch would show if a sum that steps compute starts at zero in each batch."""
        return any(map(self._differs_from_zero, self._merging.ambiguous))

    def _differs_from_zero(self, path: Path) -> bool:
        thing: Any = self._module
        for kind, key in path:
            thing = entry_at(read_entries(thing), key) if can_change(thing) and kind != "*" else None
        return isinstance(thing, (int, float, torch.Tensor)) and bool(torch.as_tensor(thing).any())

    def merge_microbatches(self) -> list[_Changed]:
        """Set the state that one process would have after the batch, on the last stage.

        Returns:
            The changes, for other ranks.
        """
        spans = sorted(self._results)
        rows = [span.rows for span in spans]
        results, self._results = [self._results[span] for span in spans], {}
        whole, self._whole = self._whole, None
        written = self._written()
        cut, self.token_cut = self.token_cut, None
        self._merging.restore_order = cut.restore_samples if cut is not None and len(results) > 1 else None
        for index in sorted({index for result in results for index in result}):
            holder = self._holders[index]
            contents = [result.get(index, holder.kept) for result in results]
            content: Any = contents[0]
            # Layers have written to it, so that the comparison of losses checks it.
            if len(contents) > 1 and holder.shared:
                content = self._merging.merge_unchecked(holder.path, holder.kept, contents, rows)
            elif len(contents) > 1:
                expected = None if whole is None else whole.get(index, holder.kept)
                content = self._merging.merge(holder.path, holder.kept, contents, rows, expected)
            write_entries(holder.thing, self._originals(holder, content, written))
        self._merging.warn_of_guesses()
        return self.collect_changes()

    def discard_batch(self) -> None:
        """End a batch without its changes, after the caller has reverted them."""
        self._results, self._whole, self._active = {}, None, False
        self.generators.discard_batch()
        self.remember_state()

    def collect_changes(self) -> list[_Changed]:
        """Return the changes since the batch began or since the last `apply_changes`, for other ranks."""
        found, written = [], self._written()
        for index, content in self._differences(merged=None).items():
            holder = self._holders[index]
            if not self._is_there(holder):
                continue  # the object in its place is sent with the object that holds it
            changed = self._changed(holder, content, written)
            if changed is not None:
                found.append(changed)
        return found

    def apply_changes(self, changes: Sequence[_Changed] | None = None) -> None:
        """Apply the changes of the last stage and end the batch.

        Args:
            changes: the changes; None if this rank already has them.
        """
        if changes is not None:
            own = [self._own(changed) for changed in changes]
            self.restore_state(everything=True)
            for changed, kept in zip(changes, own, strict=True):
                self._apply(changed, kept)
        self._active = False

    def synchronise_ranks(self, control: Control, last_rank: int, last: bool) -> None:
        """Give all ranks the state of the last stage. A collective call.

        Args:
            control: collectives of the ranks.
            last_rank: the global rank of the last stage.
            last: whether this rank has the last stage.
        """
        if control.size > 1:
            changes = control.broadcast(self.collect_changes() if last else None, last_rank)
            self.apply_changes(None if last else changes)

    def follow_hook(self, hook: Hook, synchronise: Callable[[], None]) -> Hook:
        """Return a hook after which all ranks have the state of the last stage.

        Objects that can't be sent stay as they are on each rank.

        Args:
            hook: the user's hook.
            synchronise: gives all ranks the state of the last stage.
        """

        @functools.wraps(hook)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.remember_state()
            self._in_hook = True
            try:
                result = hook(*args, **kwargs)
                synchronise()
            finally:
                self._in_hook = False
            return result

        return run

    def expect_overlap(self, schedule: str, alone: bool) -> None:
        """Watch the first steps, because batches overlap with this schedule and their changes are not merged.

        Args:
            schedule: the name of the schedule, for warnings.
            alone: whether this rank is the only one of its pipeline.
        """
        self._overlapping, self._alone, self._watched = schedule, alone, _N_WATCHED_STEPS
        self._watched_hooks = _N_WATCHED_STEPS
        self.generators.expect_overlap(alone)

    def refuse_changes(self, why: str) -> None:
        """Watch the first steps and refuse changes of the state, because no rank has the state of a whole batch.

        Args:
            why: the reason and a way out, for the message.
        """
        self._why_refused, self._watched = why, _N_WATCHED_STEPS

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
                f"{self._overlapping!r}, so each micro-batch sets it, and other ranks have it only after a flush, as "
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
                f"on_before_optimizer_step, sets {found[0]}. Batches overlap with schedule {self._overlapping!r}, so "
                "each rank sets it when it steps, and steps of later batches may have begun before. Set it in "
                "on_train_batch_start, or use a schedule that flushes between batches, such as '1f1b'"
            )

    @contextmanager
    def _watch_entries(self, cut: bool) -> Iterator[list[str]]:
        """Watch the state in the block.

        Yields:
            A list that contains, after the block, the name of an entry that was set, if there is one.
        """
        before = self.read_objects()
        tensors = [t for content in before.values() for t in entry_values(content) if _is_tensor(t)]
        versions = [(t, tensor_version(t)) for t in tensors]
        found: list[str] = []
        yield found
        written = {id(t) for t, version in versions if tensor_version(t) != version}
        names = (_set_entry(path, before.get(path), after, written, cut) for path, after in self.read_objects().items())
        found += [name for name in names if name][:1]

    def capture_state(self) -> BatchState:
        """Return the present state, as hooks have left it for the steps of one of several overlapping batches."""
        before, self._captured = self._captured, {}
        for thing in (holder.thing for holder in self._holders if holder.merged):
            content, known = read_entries(thing), before.get(id(thing))
            if known is not None and have_same_entries(content, known[1]):
                content = known[1]
            self._captured[id(thing)] = thing, content
        tensors = {
            id(t): t
            for _, content in self._captured.values()
            for t in entry_values(content)
            if _is_tensor(t) and count_bytes(t) <= _MAX_COPIED_BYTES_PER_BATCH
        }
        self._copies = {
            key: self._copies[key] if self._is_copied(t) else (t, tensor_version(t), t.detach().clone())
            for key, t in tensors.items()
        }
        return BatchState(list(self._captured.values()), dict(self._copies), self._set_by_steps, self.generators)

    def _is_copied(self, tensor: torch.Tensor) -> bool:
        known = self._copies.get(id(tensor))
        return known is not None and known[0] is tensor and known[1] == tensor_version(tensor)

    def read_objects(self) -> dict[Path, Content]:
        """Return the entries of all objects with merged changes, by their paths."""
        return {holder.path: read_entries(holder.thing) for holder in self._holders if holder.merged}

    def object_ids(self) -> set[int]:
        """Return the ids of all objects."""
        return {id(holder.thing) for holder in self._holders}

    # ---- objects and their entries

    def _walk(self) -> None:
        """Find the objects around the layers, and the generators."""
        found: list[_Holder] = []
        seen = set(self._skipped)
        queue: deque[tuple[Path, Any, int, bool]] = deque([((), self._module, 0, True)])
        while queue and len(found) < _MAX_WATCHED_OBJECTS:
            path, thing, depth, merged = queue.popleft()
            if id(thing) in seen or depth > _MAX_STATE_DEPTH or not can_change(thing):
                continue
            seen.add(id(thing))
            merged = merged and not isinstance(thing, Metric)
            if not isinstance(thing, (tuple, frozenset)):
                found.append(_Holder(path, thing, [], merged, id(thing) in self._shared))
                found[-1].remember_entries()
            for kind, key, value in iterate_entries(thing):
                if isinstance(thing, Metric) and str(key).startswith("_"):
                    continue  # the metric's own tables of states
                queue.append(((*path, (kind, key)), value, depth + 1, merged))
        self._holders = found
        self._note_modules()
        self.generators.find()

    def _note_modules(self) -> None:
        """Note the present entries of the modules for `_find_changed`, except modules that change in every step."""
        self._others, modules = [], list[nn.Module]()
        for index, holder in enumerate(self._holders):
            if isinstance(holder.thing, nn.Module) and not isinstance(holder.thing, (Metric, pl.LightningModule)):
                modules.append(holder.thing)
            else:
                self._others.append(index)
        self._module_entries = _ModuleEntries(modules)

    def _find_changed(self) -> list[int]:
        """Return the positions of the holders with other objects as entries than before the batch."""
        looked_at = self._others if self._module_entries.are_unchanged() else range(len(self._holders))
        return [index for index in looked_at if not self._holders[index].is_unchanged()]

    def _leads_to_others(self, holder: _Holder) -> bool:
        """Return whether a holder has gained or lost an object with its own entries, or a generator."""
        before = {id(value) for value in entry_values(holder.kept)}
        content = entry_values(read_entries(holder.thing))
        after = {id(value) for value in content}
        lost = [value for value in entry_values(holder.kept) if id(value) not in after]
        changed = [*lost, *(value for value in content if id(value) not in before)]
        return any(can_change(value) or isinstance(value, GENERATOR_TYPES) for value in changed)

    def _remember(self, written: Collection[int] = ()) -> None:
        """Keep the versions of tensors, and copies of tensors that may be changed in place."""
        before, self._known = self._known, {}
        norms = [holder.thing for holder in self._holders if isinstance(holder.thing, BatchNorm)]
        self._statistics = [(id(norm.num_batches_tracked), [*map(id, norm.buffers(recurse=False))]) for norm in norms]
        for holder in self._holders:
            own = holder.merged and not holder.shared and isinstance(holder.kept, dict)
            for tensor in holder.tensors:
                if id(tensor) not in self._known:
                    copied = own and (
                        self._begun < _N_COPIED_BATCHES
                        or count_bytes(tensor) <= _MAX_COPIED_BYTES_PER_BATCH
                        or id(tensor) in self._unstable
                    )
                    version = tensor_version(tensor)
                    known = before.get(id(tensor))  # the entry holds the tensor, so its id is still valid
                    if (
                        known is None
                        or id(tensor) in written
                        or known[1] != version
                        or (known[2] is not None) != copied
                    ):
                        known = tensor, version, tensor.detach().clone() if copied else None
                    self._known[id(tensor)] = known

    def _differences(self, merged: bool | None) -> dict[int, Content]:
        written = self._written()
        self._unstable.update(written)
        changed = {*self._find_changed()}
        if written:
            changed.update(n for n, each in enumerate(self._holders) if any(id(t) in written for t in each.tensors))
        found = ((index, self._holders[index]) for index in sorted(changed))
        return {n: read_entries(each.thing) for n, each in found if merged is None or each.merged == merged}

    def _is_there(self, holder: _Holder) -> bool:
        """Return whether the path of a holder still leads to its object."""
        try:
            return follow_path(self._module, holder.path) is holder.thing
        except (LookupError, AttributeError, TypeError):
            return False

    def _written(self) -> set[int]:
        """Return the ids of the tensors that were changed in place."""
        found = {id(t) for t, version, _ in self._known.values() if tensor_version(t) != version}
        for counter, statistics in self._statistics:
            if counter in found:
                found.update(statistics)
        return found

    def _originals(self, holder: _Holder, content: Content, written: Collection[int]) -> Any:
        """Return the entries, with the original objects in place of tensors that were changed in place."""
        if isinstance(content, set):
            return content

        def find_original(key: Any, value: Any) -> Any:
            before = entry_at(holder.kept, key)
            known = self._known.get(id(before))
            if known is None or known[2] is None or not isinstance(value, torch.Tensor):
                return value
            if id(before) not in written or value.shape != before.shape or value.dtype != before.dtype:
                return value
            if value is not before:
                names = (each for other in self._holders for each in entry_values(other.kept))
                if sum(each is before for each in names) > 1:
                    return value  # the step has replaced it here, and may read the old one elsewhere
                with torch.no_grad():
                    before.copy_(value)
            return before

        return map_entries(content, find_original)

    def _changed(self, holder: _Holder, content: Content, written: Collection[int]) -> _Changed | None:
        kept = holder.kept
        if isinstance(content, list) and isinstance(kept, list) and isinstance(holder.thing, list):
            same = len(content) >= len(kept) and all(map(is_, content, kept))
            start = len(kept) if same and not any(id(t) in written for t in holder.tensors) else 0
            tail = self._sendable(holder.path, content[start:])
            if tail is MISSING:
                return _Changed(holder.path, own=None)
            return _Changed(holder.path, tail=(start, tail), on_device=_on_device(tail))
        if not isinstance(content, dict):
            values = self._sendable(holder.path, content)
            if values is MISSING:
                return _Changed(holder.path, own=None)
            return _Changed(holder.path, values, on_device=_on_device(values))
        assert isinstance(kept, dict)
        found, in_place, own = {}, [], []
        for key, value in content.items():
            if kept.get(key, MISSING) is value and id(value) not in written:
                continue
            if kept.get(key, MISSING) is value:
                in_place.append(key)
            sent = self._sendable((*holder.path, (".", key)), value)
            if sent is MISSING:
                own.append(key)
            else:
                found[key] = sent
        gone = [key for key in kept if key not in content]
        return _Changed(holder.path, found, gone, None, in_place, _on_device(found), own)

    def _sendable(self, path: Path, value: Any) -> Any:
        value = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, value)
        leaves = pytree.tree_leaves(value)
        if any(isinstance(leaf, RemoteTensor) for leaf in leaves):
            return MISSING  # hooks have computed it from weights, on each rank from its own
        if all(isinstance(leaf, (torch.Tensor, str, bytes, int, float, complex, type(None))) for leaf in leaves):
            return value
        if self._in_hook:
            return MISSING
        try:
            pickle.dumps(value)
        except Exception as error:
            if path not in self._refused:
                self._refused.add(path)
                rank_zero_warn(
                    f"{format_path(path)} was set on the last stage to a value that can't be sent to other ranks "
                    f"({type(error).__name__}: {error}). Their hooks, layers and code before the layers don't have "
                    "it. Keep numbers, tensors, and lists and dicts of them"
                )
            return MISSING
        return value

    def _own(self, changed: _Changed) -> Content | None:
        """Return the entries of this rank that can't be sent."""
        if changed.own is not None and not changed.own:
            return None
        try:
            content = read_entries(follow_path(self._module, changed.path))
        except (LookupError, AttributeError, TypeError):  # only the last stage has the object
            return None
        if changed.own is None or not isinstance(content, dict):
            return content
        return {key: content[key] for key in changed.own if key in content}

    def _apply(self, changed: _Changed, own: Content | None) -> None:
        thing = follow_path(self._module, changed.path)
        if changed.own is None:
            if own is not None:
                write_entries(thing, own)
            return
        move = changed.on_device and self._device.type != "cpu"
        if changed.tail is not None:
            start, tail = changed.tail
            thing[start:] = move_data_to_device(tail, self._device) if move else tail
            return
        values = move_data_to_device(changed.values, self._device) if move else changed.values
        content = read_entries(thing)
        if not isinstance(content, dict):
            write_entries(thing, values)
            return
        for key, value in values.items():
            before = content.get(key)
            if isinstance(before, RemoteTensor):
                continue  # a hook has computed it from weights, on each rank from its own
            if key in changed.in_place and isinstance(before, torch.Tensor) and before.shape == value.shape:
                with torch.no_grad():
                    before.copy_(value)
            else:
                content[key] = value
        for key in changed.gone:
            content.pop(key, None)
        if isinstance(own, dict):
            content.update(own)
        write_entries(thing, content)


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


def _is_foreign(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no values here, or is trained."""
    return isinstance(tensor, nn.Parameter) or tensor.is_meta


def _is_tensor(thing: Any) -> bool:
    return isinstance(thing, torch.Tensor) and not _is_foreign(thing)


def _on_device(tree: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu" for leaf in pytree.tree_leaves(tree))
