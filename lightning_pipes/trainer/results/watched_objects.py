"""Objects in a module, and the comparison of their entries with the entries at the start of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from lightning_pipes.trainer.results.merging import Path
from lightning_pipes.trainer.results.module_entries import (
    HIDDEN_NAMES,
    Content,
    entry_values,
    have_same_entries,
    is_state_tensor,
    read_entries,
    view_entries,
)

_MAX_CHECKED_ENTRIES = 256
"""The largest number of entries of a list whose tensors are checked for changes in place."""


@dataclass
class WatchedObject:
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
            self.tensors = [t for t in entry_values(self.kept) if is_state_tensor(t)]

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


class ModuleEntries:
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
