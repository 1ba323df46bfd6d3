"""Argument and result trees of functions, and the units of a step so far, in a form that can be sent."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_pipes.engine.compute.spans import MicrobatchLeaf
from lightning_pipes.engine.messages.message import FrozenLeaf
from lightning_pipes.engine.trees import SentWhole, make_named
from lightning_pipes.ir import PipelineError


class TemplateLeaf:
    """A leaf of a template, in place of a tensor."""


_TRACE_LEAF_TYPES = (torch.Tensor, TemplateLeaf, str, bytes, int, float, complex, type(None))
_CONSTANT_TYPES = frozenset((str, int, float, bool, type(None), torch.dtype, torch.device))
_SIMPLE_TYPES = _CONSTANT_TYPES | {torch.Tensor, nn.Parameter}


def map_leaves(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return the tree with every leaf changed. Unknown objects are leaves."""
    if isinstance(tree, _TRACE_LEAF_TYPES):
        return change(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return make_named(tree, (map_leaves(entry, change) for entry in tree))
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
    """Return whether a tree is a named tuple of torch, such as the result of `torch.topk`.

    Such a tuple is created like a plain tuple.
    """
    return isinstance(tree, tuple) and type(tree).__module__ == "torch.return_types"


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a tree, in order."""
    found: list[torch.Tensor] = []
    _collect(tree, found)
    return found


def tensors_of_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among the arguments of a call, in order. This is a fast path of `tensors_of`."""
    entries = [*args, *kwargs.values()] if kwargs else args
    if _SIMPLE_TYPES.issuperset(map(type, entries)):
        return [entry for entry in entries if type(entry) not in _CONSTANT_TYPES]
    return tensors_of([*entries])


def _collect(tree: Any, found: list[torch.Tensor]) -> None:
    kind = type(tree)
    if kind in _SIMPLE_TYPES:  # the most frequent kinds first
        if kind not in _CONSTANT_TYPES:
            found.append(tree)
    elif isinstance(tree, torch.Tensor):
        found.append(tree)
    elif isinstance(tree, _TRACE_LEAF_TYPES):
        return
    elif isinstance(tree, (tuple, list)):
        if kind in (tuple, list) or hasattr(tree, "_fields") or _is_result_of_torch(tree):
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


@dataclass(frozen=True)
class KnownValue(TemplateLeaf):
    """A tensor that already has a key."""

    key: int


@dataclass(frozen=True)
class KnownPure(TemplateLeaf):
    """A tensor that every stage computes, by its number."""

    number: int


@dataclass(frozen=True)
class Made(TemplateLeaf):
    """A tensor that a unit makes.

    Attributes:
        key: the key of the value.
        shape: its shape.
        stride: its strides.
        dtype: its data type.
        on_host: whether it is on the CPU although the device of the stage is not.
        requires_grad: whether it requires a gradient.
    """

    key: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    on_host: bool
    requires_grad: bool


@dataclass(frozen=True)
class KnownWeight(TemplateLeaf):
    """A parameter that a unit returns unchanged, by its name in the user's module."""

    name: str


class Done(NamedTuple):
    """A unit that has run.

    Attributes:
        name: the path of a module, or the name of a function.
        pure: whether every stage runs it. Otherwise only one stage does.
        out: its result, with a TemplateLeaf for each tensor. Plain values are control-flow decisions.
        written: the numbers of the pure tensors that it has changed, each with its new key.
        draws: the number of its calls that drew random numbers.
        generators: the states of the module's own generators that it drew from.
    """

    name: str
    pure: bool = True
    out: Any = None
    written: tuple[tuple[int, int], ...] = ()
    draws: int = 0
    generators: tuple[tuple[int, bytes], ...] = ()


@dataclass
class Trace(SentWhole, FrozenLeaf, MicrobatchLeaf):
    """The units before a border, and the keys of the values that cross it.

    Attributes:
        units: all units before the border, in order.
        keys: the keys of the values, in the order in which the values are sent.
        shared: groups of keys whose values share memory on the sender.
        rows: the number of samples of the micro-batch.
        failure: the reason why an earlier stage could not run its part, if this must not end the run. Empty if it
            could.
    """

    units: list[Done] = field(default_factory=list)
    keys: tuple[int, ...] = ()
    shared: tuple[tuple[int, ...], ...] = ()
    rows: int = 0
    failure: str = ""

    def __eq__(self, other: object) -> bool:  # traces are leaves of messages, which are never compared by content
        return self is other

    __hash__ = None  # type: ignore[assignment]

    def check_joined(self, others: Sequence[Trace]) -> None:
        """Check that micro-batches took the same path, so that a later stage can run them as one.

        Raises:
            PipelineError: they took different paths.
        """
        for other in others:
            if other is self:
                continue
            pairs = zip(self.units, other.units, strict=False)
            number = next((n for n, (a, b) in enumerate(pairs) if not _took_same_path(a, b)), None)
            if number is not None or self.keys != other.keys or len(self.units) != len(other.units):
                at = min(len(self.units), len(other.units)) - 1 if number is None else number
                raise PipelineError(
                    f"Micro-batches of one batch took different paths through the step, at unit {at}, "
                    f"{self.units[at].name}, but the next stage runs their samples together. Let control flow depend "
                    "on no values of samples, or use a schedule that cuts a batch equally everywhere, such as '1f1b'"
                )


def _took_same_path(one: Done, other: Done) -> bool:
    """Return whether a unit had the same results for two micro-batches, except for the shapes of tensors."""

    def without_shape(leaf: Any) -> Any:
        return replace(leaf, shape=(), stride=()) if isinstance(leaf, Made) else leaf

    try:
        return bool(
            one._replace(out=map_leaves(one.out, without_shape))
            == other._replace(out=map_leaves(other.out, without_shape))
        )
    except (TypeError, ValueError, RuntimeError):  # results may contain objects without a truth value, such as arrays
        return False
