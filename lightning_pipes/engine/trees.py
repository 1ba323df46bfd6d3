"""Trees of tensors: torch's pytrees, and objects that torch treats as leaves of them.

A dataclass, a subclass of a list or a dictionary, and any other object that can be pickled is replaced by its state.
Its tensors then belong to the tree like all other tensors: they are cut, joined and sent, and gradients flow back to
them.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree


class SentWhole:
    """The base class of objects that are sent unchanged, because they contain no tensors."""


class ObjectState(NamedTuple):
    """The state of an object, as pickle reduces it.

    Attributes:
        number: the position of the object in the order in which the objects of a tree are found.
        make: creates the object from `args`.
        args: the arguments of `make`.
        state: the attributes of the object, or the argument of its `__setstate__`.
        items: the entries that are appended to the object.
        pairs: the entries that are set in the object, by key.
    """

    number: int
    make: Callable[..., Any]
    args: Any
    state: Any
    items: Any
    pairs: Any


class ObjectReference(NamedTuple):
    """Stands for an object that also has an earlier place in the tree."""

    number: int


_LEAF_TYPES = (
    *(torch.Tensor, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.Generator),
    *(nn.Module, np.ndarray, np.generic),
    *(str, bytes, int, float, complex, type(None), Enum, slice, range),
    *(type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, SentWhole, ObjectState, ObjectReference),
)
_STANDS_FOR_OBJECT = (ObjectState, ObjectReference)


def open_objects(tree: Any) -> Any:
    """Return a pytree of all tensors of `tree`, in which objects with tensors are replaced by an `ObjectState`.

    An object remains a leaf if it contains no tensor or can't be pickled.
    """
    if isinstance(tree, torch.Tensor):
        return tree
    leaves, spec = pytree.tree_flatten(tree, is_leaf=_is_packed)
    if all(isinstance(leaf, _LEAF_TYPES) for leaf in leaves):
        return tree
    opening = _Opening()
    return pytree.tree_unflatten([opening.open_leaf(leaf) for leaf in leaves], spec)


def close_objects(tree: Any) -> Any:
    """Return the tree that `open_objects` has opened."""
    made: dict[int, Any] = {}

    def close(node: Any) -> Any:
        if isinstance(node, ObjectReference):
            return made[node.number]
        if isinstance(node, ObjectState):
            return _make_object(node, close, made)
        return pytree.tree_map(
            lambda leaf: close(leaf) if isinstance(leaf, _STANDS_FOR_OBJECT) else leaf,
            node,
            is_leaf=lambda part: isinstance(part, _STANDS_FOR_OBJECT),
        )

    return tree if isinstance(tree, torch.Tensor) else close(tree)


def flatten_message(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the leaves of a tree, and a function that returns the same tree with other leaves.

    Tuples of tensors, which most messages are, take a tenth of the time of torch's pytree.

    Args:
        tree: the tree.
        is_leaf: returns whether a node is a leaf although it has children.
    """
    if type(tree) in (tuple, list) and _is_simple(tree):
        leaves: list[Any] = []
        _collect_simple(tree, leaves)
        return leaves, lambda others: _rebuild_simple(tree, iter(others))
    found, spec = pytree.tree_flatten(tree, is_leaf=is_leaf)
    return found, lambda others: pytree.tree_unflatten(others, spec)


def _is_simple(tree: Any) -> bool:
    """Return whether a tree consists of plain tuples and lists of tensors, None, and objects that are sent whole."""
    kind = type(tree)
    if kind is tuple or kind is list:
        for entry in tree:
            if type(entry) is not torch.Tensor and entry is not None and not _is_simple(entry):
                return False
        return True
    return kind is torch.Tensor or isinstance(tree, SentWhole)


def _collect_simple(tree: Any, leaves: list[Any]) -> None:
    for entry in tree:
        if type(entry) is tuple or type(entry) is list:
            _collect_simple(entry, leaves)
        else:
            leaves.append(entry)


def _rebuild_simple(tree: Any, leaves: Iterator[Any]) -> Any:
    return type(tree)(
        [
            _rebuild_simple(entry, leaves) if type(entry) is tuple or type(entry) is list else next(leaves)
            for entry in tree
        ]
    )


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves and the structure of a tree after opening its objects."""
    leaves, spec = pytree.tree_flatten(open_objects(tree))
    return leaves, spec


def map_tensors(change: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Return the tree with the result of `change` for each tensor. A tensor with several places is changed once."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    made: dict[int, Any] = {}

    def change_once(tensor: torch.Tensor) -> Any:
        if id(tensor) not in made:
            made[id(tensor)] = change(tensor)
        return made[id(tensor)]

    opened = open_objects(tree)
    changed = pytree.tree_map_only(torch.Tensor, change_once, opened)
    return changed if opened is tree else close_objects(changed)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a tree, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for leaf in pytree.tree_leaves(open_objects(tree)) if isinstance(leaf, torch.Tensor)]


def make_named(like: Any, entries: Iterable[Any]) -> Any:
    """Return a named tuple of the class of `like`, without calling the constructor of the class.

    The constructor of a PackedSequence accepts only tensors, but `entries` may contain placeholders of tensors.
    """
    return type(like)._make(entries)


def _is_packed(part: Any) -> bool:
    """Return whether a part is a named tuple that torch can't rebuild from placeholders of its tensors."""
    return isinstance(part, PackedSequence)


def _reduce_packed(packed: PackedSequence) -> tuple[Callable[..., PackedSequence], tuple[Any, ...]]:
    return PackedSequence._make, (tuple(packed),)


copyreg.pickle(PackedSequence, _reduce_packed)


class _Opening:
    """The objects of one tree that were opened."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # kept alive, so that no other object gets the same id

    def open_leaf(self, thing: Any) -> Any:
        if isinstance(thing, _LEAF_TYPES):
            return thing
        if id(thing) in self._numbers:
            return ObjectReference(self._numbers[id(thing)])
        try:
            parts = thing.__reduce_ex__(4)
        except Exception:  # the object can't be pickled
            return thing
        if not isinstance(parts, tuple) or len(parts) > 5:  # a name, or an object with its own state setter
            return thing
        number = self._numbers[id(thing)] = len(self._numbers)
        self._kept.append((thing, parts))
        make, args, state, items, pairs = (*parts, None, None, None)[:5]
        if make is copyreg.__newobj__:  # type: ignore[attr-defined]
            make, args = partial(make, args[0]), args[1:]
        items, pairs = None if items is None else list(items), None if pairs is None else dict(pairs)
        opened = ObjectState(number, make, *map(self._open_tree, (args, state, items, pairs)))
        if any(isinstance(leaf, torch.Tensor) or _refers(leaf) for leaf in _leaves_of(opened)):
            return opened
        del self._numbers[id(thing)]
        return thing

    def _open_tree(self, tree: Any) -> Any:
        return pytree.tree_map(self.open_leaf, tree, is_leaf=_is_packed)


def _leaves_of(opened: ObjectState) -> list[Any]:
    return pytree.tree_leaves(opened, is_leaf=lambda part: isinstance(part, ObjectReference))


def _refers(leaf: Any) -> bool:
    return isinstance(leaf, ObjectReference)


def _make_object(node: ObjectState, close: Callable[[Any], Any], made: dict[int, Any]) -> Any:
    """Create the object as pickle does. Its attributes may refer to the object itself."""
    thing = made[node.number] = node.make(*close(node.args))
    state, items, pairs = close(node.state), close(node.items), close(node.pairs)
    if state is not None and hasattr(thing, "__setstate__"):
        thing.__setstate__(state)
    elif state is not None:
        attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
        vars(thing).update(attributes or {})
        for name, value in (slots or {}).items():
            object.__setattr__(thing, name, value)
    if items is not None:
        thing.extend(items)
    for key, value in (pairs or {}).items():
        thing[key] = value
    return thing
