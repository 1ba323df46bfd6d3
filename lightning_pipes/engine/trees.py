"""Trees of tensors: torch's pytrees, and the objects in them that torch takes for leaves.

A dataclass, a subclass of a list or a dict, and any other object that pickles is opened into its state, so that its
tensors are tensors of the tree like any others: they are cut, joined and sent, and gradients flow back to them.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Iterable
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
    """The base of objects that travel as they are: they hold no tensors."""


class ObjectState(NamedTuple):
    """An object as pickle takes it apart.

    Attributes:
        number: counts the objects of a tree, in the order in which they are met.
        make: creates the object from `args`.
        state: its attributes, or what its `__setstate__` takes.
        items: entries that are appended to it.
        pairs: entries that are set in it, by key.
    """

    number: int
    make: Callable[..., Any]
    args: Any
    state: Any
    items: Any
    pairs: Any


class ObjectReference(NamedTuple):
    """Stands for an object that the tree has in an earlier place, too."""

    number: int


_LEAVES = (
    *(torch.Tensor, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.Generator),
    *(nn.Module, np.ndarray, np.generic),
    *(str, bytes, int, float, complex, type(None), Enum, slice, range),
    *(type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, SentWhole, ObjectState, ObjectReference),
)
_STANDS_FOR_OBJECT = (ObjectState, ObjectReference)


def open_objects(tree: Any) -> Any:
    """Return a pytree of all tensors of `tree`, with ObjectState in the place of objects that hold some.

    An object stays a leaf if it holds no tensor, or does not pickle.
    """
    if isinstance(tree, torch.Tensor):
        return tree
    leaves, spec = pytree.tree_flatten(tree, is_leaf=_is_packed)
    if all(isinstance(leaf, _LEAVES) for leaf in leaves):
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


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves and the structure of a tree after its objects are opened."""
    leaves, spec = pytree.tree_flatten(open_objects(tree))
    return leaves, spec


def unflatten(leaves: list[Any], spec: Any) -> Any:
    """Return the tree of these leaves, of the structure that `flatten` has returned."""
    return close_objects(pytree.tree_unflatten(leaves, spec))


def map_tensors(change: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Return the tree with its tensors changed; one that is there twice is changed once."""
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
    """Return a named tuple of the class of `like`, without the class's own constructor.

    That of a PackedSequence needs tensors, and its entries may be what stands for them.
    """
    return type(like)._make(entries)


def _is_packed(part: Any) -> bool:
    """Return whether a part is a named tuple that torch can't rebuild from what stands for its tensors."""
    return isinstance(part, PackedSequence)


def _reduce_packed(packed: PackedSequence) -> tuple[Callable[..., PackedSequence], tuple[Any, ...]]:
    return PackedSequence._make, (tuple(packed),)


copyreg.pickle(PackedSequence, _reduce_packed)


class _Opening:
    """The objects of one tree that are open."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._kept: list[Any] = []  # an id is that of another object once its own is freed

    def open_leaf(self, thing: Any) -> Any:
        if isinstance(thing, _LEAVES):
            return thing
        if id(thing) in self._numbers:
            return ObjectReference(self._numbers[id(thing)])
        try:
            parts = thing.__reduce_ex__(4)
        except Exception:  # it does not pickle
            return thing
        if not isinstance(parts, tuple) or len(parts) > 5:  # a name, or an object with a setter of its own
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
    """Return the object as pickle creates it: its attributes may refer to it."""
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
