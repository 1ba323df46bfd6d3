"""Trees of what functions take and return: tuples, lists, dicts and dataclasses, with tensors in them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch


class TemplateLeaf:
    """A leaf of a template: it stands for a tensor."""


_LEAVES = (torch.Tensor, TemplateLeaf, str, bytes, int, float, complex, type(None))


def map_leaves(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return the tree with every leaf changed; unknown objects are leaves."""
    if isinstance(tree, _LEAVES):
        return change(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_leaves(entry, change) for entry in tree))
    if type(tree) in (list, tuple) or _is_result_of_torch(tree):
        return type(tree)([map_leaves(entry, change) for entry in tree])
    if type(tree) is dict:
        return {key: map_leaves(entry, change) for key, entry in tree.items()}
    if isinstance(tree, dict):  # an OrderedDict, or the output of a Hugging Face model
        new = copy.copy(tree)
        for key, entry in tree.items():
            new[key] = map_leaves(entry, change)
        return new
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        anything: Any = tree
        made = copy.copy(anything)
        for field in dataclasses.fields(tree):
            object.__setattr__(made, field.name, map_leaves(getattr(tree, field.name), change))
        return made
    return change(tree)


def _is_result_of_torch(tree: Any) -> bool:
    """Return whether a tree is a named tuple as `torch.topk` returns it, which is made like a plain tuple."""
    return isinstance(tree, tuple) and type(tree).__module__ == "torch.return_types"


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a tree, in order."""
    found: list[torch.Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[torch.Tensor]) -> None:
    if isinstance(tree, torch.Tensor):
        found.append(tree)
    elif isinstance(tree, _LEAVES):
        return
    elif isinstance(tree, (tuple, list)):
        if type(tree) in (tuple, list) or hasattr(tree, "_fields") or _is_result_of_torch(tree):
            for entry in tree:
                _collect(entry, found)
    elif isinstance(tree, dict):
        for entry in tree.values():
            _collect(entry, found)
    elif isinstance(tree, slice):
        _collect((tree.start, tree.stop, tree.step), found)
    elif hasattr(tree, "__dataclass_fields__") and not isinstance(tree, type):
        for name in tree.__dataclass_fields__:
            _collect(getattr(tree, name), found)
