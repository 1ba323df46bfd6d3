"""Values that layers leave in attributes, lists and dicts, for code after the layers: auxiliary losses, activations
that forward hooks collect. They travel to the last stage with what the layers return, and gradients back.

On one process code after the layers finds them in the object where the layer has put them. Here it looks into the copy
of that object on the last stage, so they are put in there, before that code runs. Which places layers write to is
found out in the first micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import is_
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import nn
from torch.utils import _pytree as pytree
from torchmetrics import Metric

from lightning_pipes.ir import PipelineError, Span
from lightning_pipes.trainer.module.hidden_state import OWN
from lightning_pipes.trainer.state.merging import Merging, Path
from lightning_pipes.trainer.state.module_entries import follow_path
from lightning_pipes.trainer.state.module_state import ModuleState

_LOOKS = 16
"""Runs of a stage in which all its modules are looked at."""
_PLAIN = (torch.Tensor, str, bytes, int, float, complex, type(None))
_ABSENT = object()
"""Stands for the value of an attribute that a layer does not have yet."""

Place = tuple[Any, ...]
"""Of a layer: its number, a module in it, a name. Of an object around the layers: its path, a key."""


class Sent(NamedTuple):
    """The message of a stage whose layers have left values, or return one tensor twice."""

    out: Any
    left: dict[Place, Any]


class Grown(NamedTuple):
    """The entries appended to a list."""

    tail: list[Any]


@dataclass(frozen=True)
class Same:
    """Stands for the tensor number `leaf` of a tree, which has it in several places."""

    leaf: int


class Sharing(NamedTuple):
    """A tensor that shares memory with another one of the tree."""

    tensor: Any


class LeftValues:
    """Takes the values that layers of this rank leave, and puts in those of other ranks.

    Args:
        full: all layers; those of other ranks have no values.
        local: numbers of the layers that are on this rank, which changes where layers move.
        state: of the module around the layers.
    """

    def __init__(
        self,
        module: nn.Module,
        full: Mapping[int, nn.Module],
        local: Callable[[], Collection[int]],
        state: ModuleState,
    ) -> None:
        self._module = module
        self._full = full
        self._local = local
        self._state = state
        self._lent: list[tuple[Place, Any, Any]] = []
        self._places: dict[int, list[Place]] = {}
        self._runs: dict[int, int] = {}
        self._outside = False
        self._active = False
        self._before: dict[Place, Any] = {}
        self._noted: dict[Place, dict[Span, Any]] = {}
        self._set_later: set[Place] = set()
        self._changes: dict[Place, Any] = {}
        self._merging = Merging(type(module).__name__)

    def begin_batch(self) -> None:
        """Take what layers have for that with which each micro-batch begins."""
        places = [place for n in (self._local() if self._places else ()) for place in self._places.get(n, ())]
        self._before = {p: value for p in places if not isinstance(value := self._value(p, _ABSENT), list)}
        self._noted = {}
        self._set_later.clear()
        self._active = True

    def end_batch(self) -> None:
        """Leave in the layers of this rank what one process would have after the batch."""
        merged = {}
        for place, values in self._noted.items():
            spans = sorted(values)
            rows = [span.rows for span in spans]
            found = [values[span] for span in spans]
            before = self._before.get(place)
            before = None if before is _ABSENT else before
            merged[place] = self._merging.merge(_path(place), before, found, rows, None)
            self._set(place, merged[place])
        self._changes = {place: merged[place] for place in self._set_later if place in merged}
        self._noted, self._active = {}, False

    def changes(self) -> dict[Place, Any]:
        """Return the values that code after the layers has set in layers of other ranks, in the latest batch."""
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, self._changes)  # type: ignore[no-any-return]

    def settle(self, changes: Mapping[Place, Any], device: torch.device) -> None:
        """Take over the values that code after the layers has set in layers of this rank."""
        local = self._local() if changes else ()
        for place, value in changes.items():
            if place[0] in local:
                self._set(place, move_data_to_device(value, device))

    def begin(self, layers: Iterable[int], again: bool) -> _Watch | None:
        """Look at what layers may change, before they run; None where none has ever left anything."""
        new: list[int] = []
        if not again:
            new = [number for number in layers if self._runs.get(number, 0) < _LOOKS]
            self._runs.update({number: self._runs.get(number, 0) + 1 for number in new})
        if not (new or self._places or self._outside):
            return None
        places = [place for number in layers for place in self._places.get(number, ())]
        for place in places if self._active else ():
            if place in self._before:
                self._set(place, self._before[place])
        watch = _Watch({place: _length(self._value(place)) for place in places})
        if new:
            for number in new:
                for name, part in self._full[number].named_modules():
                    if not isinstance(part, Metric):
                        watch.modules.append((number, name, part, _own(part), _lengths(part)))
        if new or self._outside:
            watch.outside = self._state.entries()
        return watch

    def end(self, watch: _Watch | None, span: Span) -> dict[Place, Any]:
        """The values that the layers have left since `begin`."""
        if watch is None:
            return {}
        outside = self._state.objects() if watch.modules else set()
        for number, name, part, before, lengths in watch.modules:
            for key, value in _own(part).items():
                place = (number, name, key)
                grown = isinstance(value, list) and value is before.get(key) and _length(value) != lengths[key]
                changed = value is not before.get(key) and not _equal(value, before.get(key))
                new = place not in watch.lengths and id(value) not in outside and not _is_computed(part, key)
                if (changed or grown) and new and _can_travel(value):
                    self._places.setdefault(number, []).append(place)
                    if self._active and not isinstance(value, list):
                        self._before[place] = before[key] if key in before else getattr(type(part), key, _ABSENT)
                    watch.lengths[place] = lengths.get(key)
        found = {}
        for place, length in watch.lengths.items():
            value = self._value(place)
            if length is not None and isinstance(value, list) and len(value) >= length:
                found[place] = Grown(list(value[length:]))
            else:
                found[place] = value
                if self._active:
                    self._noted.setdefault(place, {})[span] = value
        if watch.outside is not None:
            more = _changes(watch.outside, self._state.entries())
            self._outside = self._outside or bool(more)
            found.update(more)
        return found

    def forget_lists(self, left: Mapping[Place, Any]) -> None:
        """Take what has grown from lists of layers, once it is sent: the last stage has it."""
        for place, value in left.items():
            if isinstance(value, Grown) and isinstance(place[0], int) and value.tail:
                del self._value(place)[-len(value.tail) :]

    def put(self, left: Mapping[Place, Any]) -> None:
        """Put the values that layers have left into the objects on this rank, until `take_back`."""
        for place, value in left.items():
            *where, key = place
            of_layer = len(where) == 2
            if of_layer and not isinstance(value, Grown):
                self._lent.append((place, value, self._value(place, _ABSENT)))
            owner: Any = (
                self._full[where[0]].get_submodule(where[1]) if of_layer else follow_path(self._module, where[0])
            )
            if isinstance(value, Grown):
                (vars(owner)[key] if of_layer else owner).extend(value.tail)
            elif isinstance(owner, nn.Module):
                (owner._buffers if key in owner._buffers else owner.__dict__)[key] = value
            elif isinstance(owner, dict):
                owner[key] = value
            else:
                setattr(owner, key, value)

    def take_back(self) -> None:
        """Layers of this rank have their own values again: they may be further than those that were put there."""
        local = self._local() if self._lent else ()
        for place, put, own in reversed(self._lent):
            if place[0] in local and self._value(place) is put:
                self._set(place, own)
        self._lent.clear()

    def end_step(self, span: Span, whole: bool = False) -> None:
        """Note what code after the layers has set in them, and `take_back`.

        Args:
            whole: whether that code has run for the whole batch.
        """
        if self._active:
            for place, put, _ in self._lent:
                value = self._value(place)
                if value is not put:
                    self._set_later.add(place)
                if whole:
                    self._noted[place] = {}
                self._noted.setdefault(place, {})[span] = value
            for place, values in self._noted.items():
                if span in values:
                    values[span] = self._value(place)
                elif whole:
                    self._noted[place] = {span: self._value(place)}
        self.take_back()

    def merged(self, left: Mapping[Span, Mapping[Place, Any]]) -> dict[Place, Any]:
        """Merge the values that micro-batches have left, as the whole batch leaves them."""
        spans = sorted(left)
        if len(spans) == 1:
            return dict(left[spans[0]])
        rows = [span.rows for span in spans]
        places = dict.fromkeys(place for span in spans for place in left[span])
        return {
            place: self._merging.merge(_path(place), None, [left[span][place] for span in spans], rows, None)
            for place in places
            if all(place in left[span] for span in spans)
        }

    def _set(self, place: Place, value: Any) -> None:
        number, name, key = place
        part = self._full[number].get_submodule(name)
        if value is _ABSENT:
            vars(part).pop(key, None)
        else:
            (part._buffers if key in part._buffers else part.__dict__)[key] = value

    def _value(self, place: Place, absent: Any = None) -> Any:
        """Return the value there; where the layer has none, that of its class, else `absent`."""
        number, name, key = place
        part = self._full[number].get_submodule(name)
        if key in part._buffers:
            return part._buffers[key]
        return vars(part)[key] if key in vars(part) else getattr(type(part), key, absent)


class _Watch:
    def __init__(self, lengths: dict[Place, int | None]) -> None:
        self.lengths = lengths
        self.modules: list[tuple[int, str, nn.Module, dict[str, Any], dict[str, int]]] = []
        self.outside: dict[Any, Any] | None = None


def together(left: Mapping[Place, Any], more: Mapping[Place, Any]) -> dict[Place, Any]:
    """Join the values that earlier stages have left with those of this one."""
    joined = dict(left)
    for place, value in more.items():
        before = joined.get(place)
        grown = isinstance(before, Grown) and isinstance(value, Grown)
        joined[place] = Grown([*before.tail, *value.tail]) if grown else value  # type: ignore[union-attr]
    return joined


def pack(out: Any, left: dict[Place, Any]) -> Any:
    """Make the message: a tensor that is there twice is sent once, and the receiver has it twice as one object."""
    if isinstance(out, torch.Tensor) and not left:
        return out
    leaves, spec = pytree.tree_flatten(Sent(out, left))
    seen: dict[Any, int] = {}
    stored: dict[int, list[torch.Tensor]] = {}
    changed = bool(left)
    for at, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.is_meta:
            continue
        if id(leaf) in seen:
            leaves[at], changed = Same(seen[id(leaf)]), True
            continue
        seen[id(leaf)] = at
        if leaf.numel():
            others = stored.setdefault(leaf.untyped_storage().data_ptr(), [])
            if any(_overlap(_geometry(leaf), _geometry(other)) for other in others):
                leaves[at], changed = Sharing(leaf), True
            others.append(leaf)
    return pytree.tree_unflatten(leaves, spec) if changed else out


def unpack(received: Any) -> tuple[Any, dict[Place, Any], list[torch.Tensor]]:
    """Return the input of the layers, values left by earlier ones, and the tensors that shared memory with
    others on the rank that sent them."""
    if not isinstance(received, Sent):
        return received, {}, []
    leaves, spec = pytree.tree_flatten(received, is_leaf=lambda node: isinstance(node, Sharing))
    sharing = [leaf.tensor for leaf in leaves if isinstance(leaf, Sharing)]
    leaves = [leaf.tensor if isinstance(leaf, Sharing) else leaf for leaf in leaves]
    leaves = [leaves[leaf.leaf] if isinstance(leaf, Same) else leaf for leaf in leaves]
    whole = pytree.tree_unflatten(leaves, spec)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)] if sharing else []
    return whole.out, whole.left, tensors


def _path(place: Place) -> Path:
    return tuple((".", part) for part in place)


def _geometry(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


@lru_cache
def _overlap(a: Any, b: Any) -> bool:
    """Whether two tensors of one memory have an element in common."""
    ends = [offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) for shape, stride, offset in (a, b)]
    if min(ends) < max(a[2], b[2]):
        return False
    elements = torch.zeros(max(ends) + 1, dtype=torch.bool)
    elements.as_strided(*a).fill_(True)
    return bool(elements.as_strided(*b).any())


def check_unchanged(stage: int, tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Refuse layers that change one of two tensors in place which share memory on one process.

    Raises:
        PipelineError: a tensor is not what it was.
    """
    for tensor, version in zip(tensors, versions, strict=True):
        if tensor._version != version:
            raise PipelineError(
                f"a layer of stage {stage} changes a tensor of shape {tuple(tensor.shape)} in place that shares memory "
                "with another tensor which a layer of an earlier stage returns, as a view of it does: on one process "
                "both change, here one. Work on a copy: x = x + 1 in place of x.add_(1), or return x.clone()"
            )


def _own(part: nn.Module) -> dict[str, Any]:
    return {**{name: value for name, value in vars(part).items() if name not in OWN}, **part._buffers}


def _lengths(part: nn.Module) -> dict[str, int]:
    return {name: len(value) for name, value in _own(part).items() if isinstance(value, list)}


def _is_computed(part: nn.Module, key: str) -> bool:
    """Whether a weight is computed from others in each forward, as by torch.nn.utils.weight_norm."""
    return f"{key}_g" in part._parameters or f"{key}_orig" in part._parameters


def _length(value: Any) -> int | None:
    return len(value) if isinstance(value, list) else None


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and isinstance(a, (str, int, float, type(None))) and a == b


def _can_travel(value: Any) -> bool:
    if isinstance(value, nn.Parameter):
        return False
    return all(isinstance(leaf, _PLAIN) for leaf in pytree.tree_leaves(value))


def _changes(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> dict[Place, Any]:
    """The entries of objects around the layers that have changed or were added."""
    found: dict[Place, Any] = {}
    for path, content in after.items():
        kept = before.get(path)
        if isinstance(content, list) and isinstance(kept, list):
            if len(content) > len(kept) and all(map(is_, content, kept)) and _can_travel(content[len(kept) :]):
                found[path, "append"] = Grown(content[len(kept) :])
        elif isinstance(content, dict) and isinstance(kept, dict):
            for key, value in content.items():
                if value is not kept.get(key, found) and not _equal(value, kept.get(key)) and _can_travel(value):
                    found[path, key] = value
    return found


def layers_by_number(full: nn.Module) -> dict[int, nn.Module]:
    """All layers by their number."""
    return {number: layer for number, layer in enumerate(full._modules.values()) if layer is not None}
