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
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torchmetrics import Metric

from lightning_pipes.engine.compute.footprint import count_bytes
from lightning_pipes.engine.private_torch import BatchNorm
from lightning_pipes.ir import Span
from lightning_pipes.trainer.data.token_cut import TokenCut
from lightning_pipes.trainer.ranks.control import Control
from lightning_pipes.trainer.results.batch_state import MAX_COPIED_BYTES_PER_BATCH, BatchState, BatchStateRecorder
from lightning_pipes.trainer.results.entry_watch import EntryWatch
from lightning_pipes.trainer.results.generators import ModuleGenerators
from lightning_pipes.trainer.results.merging import Path, ValueMerger
from lightning_pipes.trainer.results.module_entries import (
    Content,
    entry_at,
    entry_values,
    follow_path,
    iterate_entries,
    map_entries,
    read_entries,
    tensor_version,
    write_entries,
)
from lightning_pipes.trainer.results.state_exchange import StateChange, StateExchange
from lightning_pipes.trainer.results.watched_objects import ModuleEntries, WatchedObject
from lightning_pipes.trainer.user.unchanged import GENERATOR_TYPES
from lightning_pipes.trainer.user.user_objects import can_change

_MAX_WATCHED_OBJECTS = 10_000
"""The largest number of objects that are watched."""
_MAX_STATE_DEPTH = 8
"""The largest depth of a watched object below the module."""
_N_COPIED_BATCHES = 2
"""Before this number of batches, all tensors are copied."""

Hook = Callable[..., Any]


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
        self.generators = generators
        self._merging = ValueMerger(type(module).__name__)
        self.token_cut: TokenCut | None = None
        """The micro-batches of the current batch, if its samples are in another order than they were loaded."""
        self._holders: list[WatchedObject] = []
        self._module_entries = ModuleEntries([])
        self._others: list[int] = []
        """The positions of the holders that `_module_entries` does not contain."""
        self._known: dict[int, tuple[torch.Tensor, int, torch.Tensor | None]] = {}
        self._unstable: set[int] = set()
        self._begun = 0
        self._active = False
        self._clean = True
        self._statistics: list[tuple[int, list[int]]] = []
        """For each batch norm, the id of its counter and the ids of its buffers.

        torch changes these buffers without new versions.
        """
        self._results: dict[Span, dict[int, Content]] = {}
        self._whole: dict[int, Content] | None = None
        self.watch = EntryWatch(module, self.read_objects)
        self._exchange = StateExchange(module, device)
        self._batch_states = BatchStateRecorder(generators)
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

    def merge_microbatches(self) -> list[StateChange]:
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

    def collect_changes(self) -> list[StateChange]:
        """Return the changes since the batch began or since the last `apply_changes`, for other ranks."""
        found, written = [], self._written()
        for index, content in self._differences(merged=None).items():
            holder = self._holders[index]
            if not self._is_there(holder):
                continue  # the object in its place is sent with the object that holds it
            changed = self._exchange.find_change(holder, content, written)
            if changed is not None:
                found.append(changed)
        return found

    def apply_changes(self, changes: Sequence[StateChange] | None = None) -> None:
        """Apply the changes of the last stage and end the batch.

        Args:
            changes: the changes; None if this rank already has them.
        """
        if changes is not None:
            own = [self._exchange.own_entries(changed) for changed in changes]
            self.restore_state(everything=True)
            for changed, kept in zip(changes, own, strict=True):
                self._exchange.apply_change(changed, kept)
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
            self._exchange.in_hook = True
            try:
                result = hook(*args, **kwargs)
                synchronise()
            finally:
                self._exchange.in_hook = False
            return result

        return run

    def expect_overlap(self, schedule: str, alone: bool) -> None:
        """Prepare for overlapping batches. The changes of such batches are not merged.

        Args:
            schedule: the name of the schedule, for warnings.
            alone: whether this rank is the only one of its pipeline.
        """
        self.watch.expect_overlap(schedule, alone)
        self.generators.expect_overlap(alone)

    def capture_state(self) -> BatchState:
        """Return the present state, as hooks have left it for the steps of one of several overlapping batches."""
        return self._batch_states.capture_state(holder.thing for holder in self._holders if holder.merged)

    def read_objects(self) -> dict[Path, Content]:
        """Return the entries of all objects with merged changes, by their paths."""
        return {holder.path: read_entries(holder.thing) for holder in self._holders if holder.merged}

    def object_ids(self) -> set[int]:
        """Return the ids of all objects."""
        return {id(holder.thing) for holder in self._holders}

    # ---- objects and their entries

    def _walk(self) -> None:
        """Find the objects around the layers, and the generators."""
        found: list[WatchedObject] = []
        seen = set(self._skipped)
        queue: deque[tuple[Path, Any, int, bool]] = deque([((), self._module, 0, True)])
        while queue and len(found) < _MAX_WATCHED_OBJECTS:
            path, thing, depth, merged = queue.popleft()
            if id(thing) in seen or depth > _MAX_STATE_DEPTH or not can_change(thing):
                continue
            seen.add(id(thing))
            merged = merged and not isinstance(thing, Metric)
            if not isinstance(thing, (tuple, frozenset)):
                found.append(WatchedObject(path, thing, [], merged, id(thing) in self._shared))
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
        self._module_entries = ModuleEntries(modules)

    def _find_changed(self) -> list[int]:
        """Return the positions of the holders with other objects as entries than before the batch."""
        looked_at = self._others if self._module_entries.are_unchanged() else range(len(self._holders))
        return [index for index in looked_at if not self._holders[index].is_unchanged()]

    def _leads_to_others(self, holder: WatchedObject) -> bool:
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
                        or count_bytes(tensor) <= MAX_COPIED_BYTES_PER_BATCH
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

    def _is_there(self, holder: WatchedObject) -> bool:
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

    def _originals(self, holder: WatchedObject, content: Content, written: Collection[int]) -> Any:
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
