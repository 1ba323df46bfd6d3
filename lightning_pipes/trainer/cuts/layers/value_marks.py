"""Marks of the values in layers before the layers run, which show the changes that the layers make."""

from __future__ import annotations

from collections.abc import Collection
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lightning_pipes.engine.compute.footprint import count_bytes
from lightning_pipes.engine.private_torch import BatchNorm
from lightning_pipes.trainer.cuts.layers.left_messages import Place
from lightning_pipes.trainer.results.module_entries import read_entries, tensor_version
from lightning_pipes.trainer.user.user_objects import LIGHTNING_ATTRIBUTES, can_change

_MAX_COPIED_BYTES = 1 << 26
"""The largest size in bytes of a tensor that is copied before a layer runs for the first time.

The copy is needed if the layer changes the tensor in place.
"""


class ObjectContent(NamedTuple):
    """The entries of an object that a layer changes in place."""

    entries: Any


class ValueMark:
    """The value of a layer before it runs, which makes changes in place detectable."""

    def __init__(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._version = tensor_version(value)
            self._copy: Any = value.detach().clone() if count_bytes(value) <= _MAX_COPIED_BYTES else value
            return
        self._entries = read_entries(value)
        self._leaves, self._spec, self._versions = _flatten(self._entries)
        self._copy = copy_entries(self._entries)
        self._rewritten = False

    @property
    def before(self) -> Any:
        """A copy of the content, in the form in which `LeftValues` keeps it.

        A list that has only grown keeps its original entries.
        """
        if isinstance(self._copy, torch.Tensor):
            return self._copy
        if isinstance(self._entries, list):
            return self._copy if self._rewritten else self._entries
        return ObjectContent(self._copy)

    def is_changed(self, value: Any) -> bool:
        """Return whether the value has changed."""
        if isinstance(value, torch.Tensor):
            return tensor_version(value) != self._version
        longer = isinstance(value, list) and len(value) > len(self._entries)
        return longer or self.is_rewritten(value)

    def is_rewritten(self, value: Any) -> bool:
        """Return whether the value has changed other than by growth, for example if a list entry was replaced."""
        if isinstance(value, torch.Tensor):
            return True
        entries = read_entries(value)
        if isinstance(entries, list):
            entries = entries[: len(self._entries)]
        leaves, spec, versions = _flatten(entries)
        same = spec == self._spec and all(map(is_, leaves, self._leaves)) and versions == self._versions
        self._rewritten = not same
        return not same


class LayerWatch:
    """The values of layers before they run.

    Attributes:
        before: the values in known places.
        lists: the entries of the lists among them.
        modules: the modules that are examined: number of the layer, path in it, module, entries, and marks of entries.
        around: ids of the objects of the module around the layers.
        outside: the entries of these objects; None if they are not watched.
    """

    def __init__(self, before: dict[Place, Any]) -> None:
        self.before = before
        self.lists = {place: list(value) for place, value in before.items() if isinstance(value, list)}
        self.modules: list[tuple[int, str, nn.Module, dict[str, Any], dict[str, ValueMark]]] = []
        self.around: Collection[int] = ()
        self.outside: dict[Any, Any] | None = None


def mark_entries(part: nn.Module, around: Collection[int]) -> tuple[dict[str, Any], dict[str, ValueMark]]:
    """Return the entries of a module, and marks of the entries that may change in place."""
    own = own_entries(part)
    marks = {}
    for key, value in own.items():
        if isinstance(value, torch.Tensor):
            if value.is_meta or isinstance(value, nn.Parameter) or isinstance(part, BatchNorm):
                continue
        elif isinstance(value, (nn.Module, tuple, frozenset)) or not can_change(value) or id(value) in around:
            continue
        marks[key] = ValueMark(value)
    return own, marks


def copy_content(value: Any) -> Any:
    """Return a copy of the entries of an object; a tensor is returned unchanged."""
    return value if isinstance(value, torch.Tensor) else copy_entries(read_entries(value))


def copy_entries(entries: Any) -> Any:
    """Copy entries, including the dicts and lists among them and the tensors without a graph."""
    return set(entries) if isinstance(entries, set) else pytree.tree_map_only(torch.Tensor, _copy_tensor, entries)


def _copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    kept = tensor.requires_grad or tensor.is_meta or count_bytes(tensor) > _MAX_COPIED_BYTES
    return tensor if kept else tensor.detach().clone()


def _flatten(entries: Any) -> tuple[list[Any], Any, list[int]]:
    """Return the leaves of entries, their tree structure, and the versions of the tensors among them."""
    leaves, spec = pytree.tree_flatten(entries)
    return leaves, spec, [tensor_version(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]


def own_entries(part: nn.Module) -> dict[str, Any]:
    """Return the attributes and buffers of a module."""
    return {**{name: value for name, value in vars(part).items() if name not in LIGHTNING_ATTRIBUTES}, **part._buffers}
