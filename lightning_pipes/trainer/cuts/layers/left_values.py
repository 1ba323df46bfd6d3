"""Values that layers leave in attributes, lists and dicts for the code after the layers.

Examples are auxiliary losses, and activations that forward hooks collect. The values are sent to the last stage along
with the outputs of the layers, and their gradients are sent back.

In one process, the code after the layers finds these values in the objects in which the layers have put them. In a
pipeline this code reads the copies of these objects on the last stage, so the values are put into the copies before the
code runs. The first micro-batches determine the places to which layers write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.utils import _pytree as pytree
from torchmetrics import Metric

from lightning_pipes.engine.compute.footprint import count_bytes
from lightning_pipes.ir import Span
from lightning_pipes.trainer.cuts.layers.left_messages import Place
from lightning_pipes.trainer.cuts.layers.value_marks import (
    LayerWatch,
    ObjectContent,
    copy_content,
    copy_entries,
    mark_entries,
    own_entries,
)
from lightning_pipes.trainer.results.merging import Path, ValueMerger, have_equal_values
from lightning_pipes.trainer.results.module_entries import follow_path, tensor_version, write_entries
from lightning_pipes.trainer.results.module_state import ModuleState
from lightning_pipes.trainer.user.remote_tensors import HookScope, RemoteTensor
from lightning_pipes.trainer.user.user_objects import is_packed

_N_EXAMINED_RUNS = 16
"""The number of runs of a layer in which all its modules are examined."""
_VALUE_TYPES = (torch.Tensor, str, bytes, int, float, complex, type(None))
_MAX_SENT_BYTES = 1 << 16
"""The largest size in bytes of a tensor that is sent for hooks.

Larger tensors are replaced by a stand-in that refuses to be read.
"""
_NO_VALUE = object()
"""Stands for the value of an attribute that a layer does not have yet."""


class ListGrowth(NamedTuple):
    """The entries appended to a list."""

    tail: list[Any]


class ListTail(NamedTuple):
    """The entries of a list from `start` on."""

    start: int
    entries: list[Any]


@dataclass(frozen=True)
class UnsentTensor:
    """A tensor that is too large to be sent to ranks that may never read it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class LeftValues:
    """The values that layers leave.

    They are collected on each rank, sent along, and put into the layers of the last stage.

    Args:
        module: the user's module.
        full: all layers. The layers of other ranks have no values.
        local: returns the numbers of the layers on this rank, which change when layers move.
        state: the state of the module around the layers.
        scope: the scope of the user's hooks, for stand-ins.
        container: the path of the pipelined module in the user's module, for messages.
    """

    def __init__(
        self,
        module: nn.Module,
        full: Mapping[int, nn.Module],
        local: Callable[[], Collection[int]],
        state: ModuleState,
        scope: HookScope,
        container: str = "",
    ) -> None:
        self._module = module
        self.layers = full
        self._local = local
        self._state = state
        self._scope = scope
        self._lent: list[tuple[Place, Any, Any, int]] = []
        self._places: dict[int, list[Place]] = {}
        owners = Counter(id(part) for layer in full.values() for part in layer.modules())
        self._shared = {part for part, layers in owners.items() if layers > 1}
        self._in_place: set[Place] = set()
        self._runs: dict[int, int] = {}
        self._outside = False
        self._active = False
        self._before: dict[Place, Any] = {}
        self._noted: dict[Place, dict[Span, Any]] = {}
        self._whole: dict[Place, Any] = {}
        self._set_later: set[Place] = set()
        self._unsent: dict[Place, UnsentTensor] = {}
        self._changes: dict[Place, tuple[bool, Any]] = {}
        self.container = container
        self._merging = ValueMerger(type(module).__name__)
        self._trains = True
        self._overlapping = ""

    def expect_overlap(self, schedule: str) -> None:
        """Prepare a warning of layers that count micro-batches, because batches overlap and values are not merged.

        Args:
            schedule: the name of the schedule, for the warning.
        """
        self._overlapping = schedule

    def warn_of_overlap(self, left: Mapping[Place, Any]) -> None:
        """Warn of a value that layers have left for one of several micro-batches, if it may be a count or an average.

        Args:
            left: the values of all stages. This method is called on the last stage.
        """
        places = [place for place, value in left.items() if isinstance(place[0], int) and _may_count(value)]
        if not (self._overlapping and places):
            return
        number, name, key = places[0]
        rank_zero_warn(
            f"layer {number}{name and f', {name}'}, sets .{key}, which it keeps from one micro-batch to the next. With "
            f"schedule {self._overlapping!r} batches overlap, so it is set for each micro-batch, and other ranks do "
            "not have it. Set PipelineStrategy(microbatches=1), or use a schedule that flushes between batches, such "
            "as '1f1b'"
        )
        self._overlapping = ""

    def begin_batch(self, training: bool = True) -> None:
        """Begin a batch. Each of its micro-batches begins with the present values of the layers.

        Args:
            training: whether it is a training batch.
        """
        self._trains = training
        places = [place for n in (self._local() if self._places else ()) for place in self._places.get(n, ())]
        self._before = {place: self._content(place) for place in places}
        self._noted, self._whole = {}, {}
        self._set_later.clear()
        self._active = True

    def reset_layer(self, layer: int) -> None:
        """Give a layer of this rank the values with which each micro-batch of this batch begins."""
        for place in self._places.get(layer, ()) if self._active else ():
            if place in self._before:
                self._set(place, self._before[place])

    def note_whole_batch(self, layer: int) -> None:
        """Record the present values of a layer, after a run with the whole batch.

        `end_batch` merges the values of micro-batches by comparison with them.
        """
        for place in self._places.get(layer, ()) if self._active else ():
            if place in self._before:
                self._whole[place] = _entries_of(self._content(place))

    def collect_whole_values(self) -> dict[Place, Any]:
        """Return the values before the batch and after a run with the whole batch, for other ranks."""
        found = {place: (self._before[place], whole) for place, whole in self._whole.items()}
        known = {place: pair for place, pair in found.items() if pair[0] is not _NO_VALUE}
        return pytree.tree_map_only(torch.Tensor, _sendable, known)  # type: ignore[no-any-return]

    def add_whole_values(self, values: Mapping[Place, Any]) -> None:
        """Add the values of layers on other ranks. Values with large tensors, which were not sent, are skipped."""
        for place, (before, whole) in values.items():
            if not any(isinstance(leaf, UnsentTensor) for leaf in pytree.tree_leaves((before, whole))):
                self._whole.setdefault(place, whole)
                if isinstance(self._before.get(place), RemoteTensor):
                    self._before[place] = before

    def end_batch(self) -> None:
        """Set the layers of this rank to the values that one process would have after the batch."""
        self._changes = {place: (False, unsent) for place, unsent in self._unsent.items()}
        for place, noted in self._noted.items():
            spans = sorted(noted)
            before, *values = map(_entries_of, (self._before.get(place), *(noted[span] for span in spans)))
            before = None if before is _NO_VALUE or isinstance(before, RemoteTensor) else before
            whole = self._whole.get(place)
            merged = self._merging.merge(self._path(place), before, values, [span.rows for span in spans], whole)
            content = ObjectContent(merged) if isinstance(noted[spans[0]], ObjectContent) else merged
            self._set(place, content)
            self._changes[place] = place in self._set_later, _tail(before, content)
        if self._trains:  # values of an earlier evaluation are compared in the first training batch
            self._merging.warn_of_guesses()
        self._noted, self._active = {}, False

    def discard_batch(self) -> None:
        """End a batch without the values of its layers, after the caller has restored the earlier values."""
        self._noted, self._whole, self._active = {}, {}, False
        self._set_later.clear()

    def collect_changes(self) -> dict[Place, tuple[bool, Any]]:
        """Return the values of layers after the latest batch, each with whether code after the layers has set it."""
        return pytree.tree_map_only(torch.Tensor, _sendable, self._changes)  # type: ignore[no-any-return]

    def apply_changes(self, changes: Mapping[Place, tuple[bool, Any]], device: torch.device) -> None:
        """Apply the changes from another rank to this rank's copies of layers.

        In layers of this rank, only values that code after the layers has set and grown lists are applied.
        """
        local = self._local() if changes else ()
        for place, (set_later, value) in changes.items():
            if place[0] not in local:
                value = pytree.tree_map_only(UnsentTensor, partial(self._stand_in, place), value)
            elif not (set_later or isinstance(value, ListTail)):
                continue
            self._set(place, move_data_to_device(value, device))

    def watch_layers(self, layers: Iterable[int], again: bool) -> LayerWatch | None:
        """Record the values of layers before they run.

        Args:
            layers: the numbers of the layers.
            again: whether the layers run again to recompute activations.

        Returns:
            The recorded values; None if no layer has left a value so far and no layer is examined.
        """
        new: list[int] = []
        if not again:
            new = [number for number in layers if self._runs.get(number, 0) < _N_EXAMINED_RUNS]
            self._runs.update({number: self._runs.get(number, 0) + 1 for number in new})
        if not (new or self._places or self._outside):
            return None
        places = [place for number in layers for place in self._places.get(number, ())]
        for place in places if self._active else ():
            if place in self._before and not (again and self._is_buffer(place)):  # a second run has copies of buffers
                self._set(place, self._before[place])
        watch = LayerWatch({place: self._value(place) for place in places})
        if new:
            watch.around = self._state.object_ids()
            for number in new:
                for name, part in self.layers[number].named_modules():
                    own_state = isinstance(part, Metric) or any(map(is_packed, part._parameters.values()))
                    if not own_state and id(part) not in self._shared:
                        watch.modules.append((number, name, part, *mark_entries(part, watch.around)))
        if new or self._outside:
            watch.outside = self._state.read_objects()
        return watch

    def collect_values(
        self, watch: LayerWatch | None, span: Span, buffer_copies: Mapping[tuple[nn.Module, str], torch.Tensor]
    ) -> dict[Place, Any]:
        """Return the values that the layers have left since `watch_layers`.

        Args:
            watch: the values recorded by `watch_layers`.
            span: the samples of the micro-batch.
            buffer_copies: by module and name, the copies of buffers to which a second run has written. The copies have
                the graph, and the buffers have the values of the first run.
        """
        if watch is None:
            return {}
        for number, name, part, own, marks in watch.modules:
            for key, value in own_entries(part).items():
                place = (number, name, key)
                if place in watch.before or id(value) in watch.around or _is_computed(part, key):
                    continue
                mark = marks.get(key)
                same = value is own.get(key) or _equal(value, own.get(key))
                written = same and mark is not None and mark.is_changed(value)
                if (same and not written) or not _can_travel(copy_content(value) if written else value):
                    continue
                self._places.setdefault(number, []).append(place)
                if written and mark is not None and mark.is_rewritten(value):
                    self._in_place.add(place)
                if self._active:
                    kept = own[key] if key in own else getattr(type(part), key, _NO_VALUE)
                    self._before[place] = mark.before if written and mark is not None else kept
                watch.before[place] = own.get(key)
                if mark is not None and isinstance(mark.before, list):
                    watch.lists[place] = mark.before
        found: dict[Place, Any] = {}
        for place, before in watch.before.items():
            number, name, key = place
            copy = buffer_copies.get((self.layers[number].get_submodule(name), key)) if buffer_copies else None
            if copy is not None:
                sent = _sendable(copy)
                found[place] = sent if place in self._in_place and isinstance(sent, UnsentTensor) else copy
                continue
            value = self._value(place)
            entries = watch.lists.get(place) if value is before and place not in self._in_place else None
            if entries is not None and len(value) >= len(entries) and all(map(is_, value, entries)):
                found[place] = ListGrowth(list(value[len(entries) :]))
            else:
                content = self._content(place)
                content = None if content is _NO_VALUE else content
                found[place] = content
                if place in self._in_place and isinstance(value, torch.Tensor):
                    found[place] = value if value.requires_grad or content is None else _sendable(content)
                if self._active:
                    self._noted.setdefault(place, {})[span] = content
        if watch.outside is not None:
            more = _changes(watch.outside, self._state.read_objects())
            self._outside = self._outside or bool(more)
            found.update(more)
        return found

    def forget_lists(self, left: Mapping[Place, Any]) -> None:
        """Remove the new entries of lists after they are sent, because the last stage has them."""
        for place, value in left.items():
            if isinstance(value, ListGrowth) and isinstance(place[0], int) and value.tail:
                del self._value(place)[-len(value.tail) :]

    def put_values(self, left: Mapping[Place, Any]) -> None:
        """Put the values that layers have left into the objects on this rank, until `take_back`."""
        for place, value in left.items():
            *where, key = place
            if len(where) == 2:
                self._put_into_layer(place, value)
                continue
            owner: Any = follow_path(self._module, where[0])
            if isinstance(value, ListGrowth):
                owner.extend(value.tail)
            elif isinstance(owner, nn.Module):
                (owner._buffers if key in owner._buffers else owner.__dict__)[key] = value
            elif isinstance(owner, dict):
                owner[key] = value
            else:
                setattr(owner, key, value)

    def _put_into_layer(self, place: Place, value: Any) -> None:
        own = self._value(place, _NO_VALUE)
        if isinstance(value, ListGrowth) and self._active:
            own[:] = [*self._before.setdefault(place, list(own)), *value.tail]
        elif isinstance(value, ListGrowth):
            own.extend(value.tail)
        elif isinstance(value, UnsentTensor):
            self._unsent[place] = value
            if place[0] not in self._local():
                self._assign(place, self._stand_in(place, value))
        else:
            kept = own
            if isinstance(value, ObjectContent):
                kept = ObjectContent(copy_content(own))
                self._in_place.add(place)
            if self._active:
                self._before.setdefault(place, kept)
            self._lent.append((place, value, kept, tensor_version(value) if isinstance(value, torch.Tensor) else 0))
            self._assign(place, value)

    def take_back(self) -> None:
        """Restore the values of the layers of this rank, which may be newer than the values that were put there."""
        local = self._local() if self._lent else ()
        for place, put, own, before in reversed(self._lent):
            if place[0] in local and self._has(place, put, before):
                self._assign(place, own)
        self._lent.clear()

    def end_step(self, span: Span, whole: bool = False) -> None:
        """Record the values that the code after the layers has set in them, and call `take_back`.

        Args:
            span: the samples of the micro-batch.
            whole: whether that code has run for the whole batch.
        """
        if self._active:
            for place, put, _, before in self._lent:
                if not self._has(place, put, before):
                    self._set_later.add(place)
                if whole:
                    self._noted[place] = {}
                self._noted.setdefault(place, {})[span] = self._content(place)
            for place, kept in self._before.items():
                if isinstance(kept, list):
                    self._noted.setdefault(place, {})
            for place, values in self._noted.items():
                if whole:
                    values.clear()
                if whole or span in values or isinstance(self._before.get(place), list):
                    values[span] = self._content(place)
        self.take_back()

    def merge_values(self, left: Mapping[Span, Mapping[Place, Any]]) -> dict[Place, Any]:
        """Merge the values that micro-batches have left into the values that the whole batch would leave."""
        spans = sorted(left)
        if len(spans) == 1:
            return dict(left[spans[0]])
        rows = [span.rows for span in spans]
        places = dict.fromkeys(place for span in spans for place in left[span])
        return {
            place: self._merge_place(place, [left[span][place] for span in spans], rows)
            for place in places
            if all(place in left[span] for span in spans)
        }

    def _merge_place(self, place: Place, values: Sequence[Any], rows: Sequence[int]) -> Any:
        """Merge one value, using the way of merging that `end_batch` has determined."""
        merge = self._merging.merge_unchecked if self._trains else partial(self._merging.merge, whole=None)
        path, kinds = self._path(place), {type(value) for value in values}
        if kinds == {ListGrowth}:
            return ListGrowth(merge(path, None, [value.tail for value in values], rows))
        merged = merge(path, self._content_before(place), [*map(_entries_of, values)], rows)
        return ObjectContent(merged) if kinds == {ObjectContent} else merged

    def _path(self, place: Place) -> Path:
        parts = (self.container, *place) if isinstance(place[0], int) else place
        return tuple((".", part) for part in parts if part != "")

    def _content_before(self, place: Place) -> Any:
        """Return the number, tensor, or entries with which each micro-batch began; None for other contents."""
        if not isinstance(place[0], int):
            return None
        value = _entries_of(self._before[place] if place in self._before else self._value(place))
        known = isinstance(value, (int, float, torch.Tensor, list, dict)) and not isinstance(value, RemoteTensor)
        return value if known else None

    def _content(self, place: Place) -> Any:
        """Return the present content of a place, in a form that later changes in place do not affect."""
        value = self._value(place, _NO_VALUE)
        if isinstance(value, list):
            return copy_entries(value) if place in self._in_place else list(value)
        if place not in self._in_place:
            return value
        return value.detach().clone() if isinstance(value, torch.Tensor) else ObjectContent(copy_content(value))

    def _set(self, place: Place, content: Any) -> None:
        """Set the content of a place.

        An object that is changed in place remains the same object.
        """
        value = self._value(place, _NO_VALUE)
        if isinstance(content, list) and isinstance(value, list):
            value[:] = copy_entries(content) if place in self._in_place else content
        elif isinstance(content, torch.Tensor) and place in self._in_place and _fits(content, value):
            with torch.no_grad():
                value.copy_(content)
        else:
            self._assign(place, content)

    def _assign(self, place: Place, content: Any) -> None:
        number, name, key = place
        part = self.layers[number].get_submodule(name)
        if content is _NO_VALUE:
            vars(part).pop(key, None)
        elif isinstance(content, ListTail):
            self._value(place)[content.start :] = content.entries
        elif isinstance(content, ObjectContent):
            write_entries(self._value(place), copy_entries(content.entries))
        else:
            (part._buffers if key in part._buffers else part.__dict__)[key] = content

    def _has(self, place: Place, put: Any, before: int) -> bool:
        """Return whether a place still has the value that was put there, unchanged."""
        value = self._value(place)
        if isinstance(put, ObjectContent):
            return _have_equal_entries(copy_content(value), put.entries)
        return value is put and (not isinstance(put, torch.Tensor) or tensor_version(put) == before)

    def _value(self, place: Place, absent: Any = None) -> Any:
        """Return the value at a place.

        If the layer has none, return the attribute of its class or `absent`.
        """
        number, name, key = place
        part = self.layers[number].get_submodule(name)
        if key in part._buffers:
            return part._buffers[key]
        return vars(part)[key] if key in vars(part) else getattr(type(part), key, absent)

    def _is_buffer(self, place: Place) -> bool:
        number, name, key = place
        return key in self.layers[number].get_submodule(name)._buffers

    def _stand_in(self, place: Place, unsent: UnsentTensor) -> torch.Tensor:
        number, name, key = place
        like = torch.empty(unsent.shape, dtype=unsent.dtype, device="meta")
        return RemoteTensor.make_like(like, f"{key!r} of layer {number}{name and f', {name}'}", self._scope)


def _have_equal_entries(a: Any, b: Any) -> bool:
    """Return whether two trees of entries have the same structure and equal leaves."""
    (leaves, spec), (others, other_spec) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    return spec == other_spec and all(map(have_equal_values, leaves, others))


def _entries_of(content: Any) -> Any:
    return content.entries if isinstance(content, ObjectContent) else content


def _tail(before: Any, content: Any) -> Any:
    """Return the new entries of a list since `before`. Other contents are returned unchanged."""
    if not isinstance(content, list):
        return content
    kept = isinstance(before, list) and len(content) >= len(before) and all(map(is_, content, before))
    start = len(before) if kept else 0
    return ListTail(start, content[start:])


def _sendable(tensor: torch.Tensor) -> torch.Tensor | UnsentTensor:
    return (
        tensor.detach() if count_bytes(tensor) <= _MAX_SENT_BYTES else UnsentTensor(tuple(tensor.shape), tensor.dtype)
    )


def _may_count(value: Any) -> bool:
    """Return whether a value is a number, or an object that is changed in place."""
    if isinstance(value, torch.Tensor):
        return not (value.ndim or value.requires_grad)
    return isinstance(value, (int, float, ObjectContent, UnsentTensor))


def _fits(content: torch.Tensor, value: Any) -> bool:
    """Return whether this content can be copied into a tensor that is changed in place."""
    if not isinstance(value, torch.Tensor) or value.is_meta or value.requires_grad:
        return False
    return value.shape == content.shape and value.dtype == content.dtype


def join_values(left: Mapping[Place, Any], more: Mapping[Place, Any]) -> dict[Place, Any]:
    """Join the values of earlier stages with the values of this stage."""
    joined = dict(left)
    for place, value in more.items():
        before = joined.get(place)
        grown = isinstance(before, ListGrowth) and isinstance(value, ListGrowth)
        joined[place] = ListGrowth([*before.tail, *value.tail]) if grown else value  # type: ignore[union-attr]
    return joined


def _is_computed(part: nn.Module, key: str) -> bool:
    """Return whether a weight is computed from others in each forward, as by torch.nn.utils.weight_norm."""
    return f"{key}_g" in part._parameters or f"{key}_orig" in part._parameters


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and isinstance(a, (str, int, float, type(None))) and a == b


def _can_travel(value: Any) -> bool:
    if isinstance(value, nn.Parameter):
        return False
    return all(isinstance(leaf, _VALUE_TYPES) for leaf in pytree.tree_leaves(value))


def _changes(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> dict[Place, Any]:
    """Return the entries of objects around the layers that have changed or were added."""
    found: dict[Place, Any] = {}
    for path, content in after.items():
        kept = before.get(path)
        if isinstance(content, list) and isinstance(kept, list):
            if len(content) > len(kept) and all(map(is_, content, kept)) and _can_travel(content[len(kept) :]):
                found[path, "append"] = ListGrowth(content[len(kept) :])
        elif isinstance(content, dict) and isinstance(kept, dict):
            for key, value in content.items():
                if value is not kept.get(key, found) and not _equal(value, kept.get(key)) and _can_travel(value):
                    found[path, key] = value
    return found


def layers_by_number(full: nn.Module) -> dict[int, nn.Module]:
    """Return all layers by their number."""
    return {number: layer for number, layer in enumerate(full._modules.values()) if layer is not None}
