"""The recorded calls of a loop over layers, which are sent from stage to stage together with the values.

This module also describes the structure of layers (modules, settings, shapes and input), because layers with the same
structure take the same time.
"""

from __future__ import annotations

import re
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from lightning_pipes.engine import trees
from lightning_pipes.ir import PipelineError

Path = tuple[int | str, ...]
"""The indices and keys that lead from the output of a layer to a part of it."""

Key = int | tuple[int, Path]
"""The key of a value that is passed between layers: the number of a value from outside of the loop, or the number of a
layer and the path of a part of its output.
"""

Around = Callable[[int, nn.Module], AbstractContextManager[None] | None]

CONSTANT_TYPES = (str, bytes, int, float, complex, type(None), torch.dtype, torch.Size, slice, range, Enum)


@dataclass(frozen=True)
class OuterValue:
    """A placeholder for a value from outside of the loop."""

    number: int


@dataclass(frozen=True)
class Output:
    """A placeholder for the output of the layer `back` layers before the current one, or for its part at `path`."""

    back: int
    path: Path = ()


@dataclass(frozen=True)
class LayerCall:
    """The arguments of the call of one layer, with OuterValue and Output in place of the values that are sent."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Tape(trees.SentWhole):
    """The calls of all layers of a loop. A tape is not flattened like a tree of tensors, but sent as one object.

    Args:
        calls: the calls in the order of the layers.
        last_use: the number of the last layer that needs each value.
    """

    def __init__(self, calls: Sequence[LayerCall], last_use: dict[Key, int]) -> None:
        self._calls = list(calls)
        self._last_use = last_use

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tape) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def describe_call(self, number: int) -> str:
        """Return the arguments of one layer as text, with the shapes of tensors instead of their values."""

        def text(entry: Any) -> Any:
            return str(tuple(entry.shape)) if isinstance(entry, torch.Tensor) else map_container(entry, text)

        call = self._calls[number]
        return repr((text(call.args), text(call.kwargs)))

    def run(self, number: int, layer: nn.Module, held: dict[Key, Any]) -> Any:
        """Run one layer on the values that have been received.

        Args:
            number: the number of the layer.
            layer: the layer.
            held: the values that this layer and later layers need.

        Returns:
            the output of the last layer; for any other layer, a tuple of the tape and the values that later layers
            need.

        Raises:
            PipelineError: a later layer needs an object that can't be sent, from the output of the layer or from a dict
                that it has filled.
        """
        call = self._calls[number]
        held = {key: dict(value) if type(value) is dict else value for key, value in held.items()}  # layers may fill it

        def value(slot: OuterValue | Output) -> Any:
            return held[slot.number if isinstance(slot, OuterValue) else (number - slot.back, slot.path)]

        args, kwargs = fill_tree(call.args, value), fill_tree(call.kwargs, value)
        out = layer(*args, **kwargs)
        if number == len(self._calls) - 1:
            return out
        kept = {key: held[key] for key in held if self._last_use[key] > number}
        for entry in kept.values():
            if type(entry) is dict:
                refuse_objects(entry, f"a dict that {type(layer).__name__} fills as layer {number}")
        for key in self._last_use:
            if isinstance(key, tuple) and key[0] == number:
                kept[key] = _part(out, key[1], args, kwargs)
                refuse_objects(kept[key], f"what {type(layer).__name__} returns as layer {number}")
        return self, kept


class TapedLayer(nn.Module):
    """A layer that accepts either its own input or, if user code calls it in a loop, a tape and its values.

    Args:
        layer: the layer.
        number: the number of the layer in the whole model.
        around: called with the number and the layer. It returns a context in which the forward pass runs, or None. By
            default, there is no context.
    """

    _run: nn.Module

    def __init__(self, layer: nn.Module, number: int, around: Around | None = None) -> None:
        super().__init__()
        self.layer = layer
        self.number = number
        self._around = around or _no_context
        self.__dict__["_run"] = layer  # faster than the lookup of a registered module

    def forward(self, x: Any) -> Any:
        layer = self._run
        around = self._around(self.number, layer)
        if around is None and not isinstance(x, tuple):  # further calls would take time between layers
            return layer(x)
        with around or nullcontext():
            if isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], Tape):
                return x[0].run(self.number, layer, x[1])
            return layer(x)

    __call__ = forward  # hooks are on the layer


def _no_context(number: int, layer: nn.Module) -> None:
    return None


def fill_tree(tree: Any, value: Callable[[OuterValue | Output], Any]) -> Any:
    """Return the tree with each OuterValue and Output replaced by its value."""
    if isinstance(tree, (OuterValue, Output)):
        return value(tree)
    return map_container(tree, lambda entry: fill_tree(entry, value))


def map_container(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of a list, tuple or dict with `change` applied to its entries. Other objects are returned as is."""
    if type(tree) in (list, tuple):
        return type(tree)([change(entry) for entry in tree])
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return trees.make_named(tree, map(change, tree))
    if type(tree) in (dict, OrderedDict):
        return type(tree)((key, change(entry)) for key, entry in tree.items())
    return tree


def is_shared_dict(thing: Any) -> bool:
    """Return whether an object is a dict in which layers may store values for later layers.

    This is the case for an empty dict, and for a UserDict of a library.
    """
    return isinstance(thing, UserDict) or (type(thing) in (dict, OrderedDict) and not thing)


def refuse_objects(thing: Any, where: str) -> None:
    """Raise PipelineError unless `thing` consists of tensors and plain values, which are equivalent on another rank.

    Args:
        thing: a value, or a container of values.
        where: the place of the value, for the message.
    """
    if isinstance(thing, (torch.Tensor, *CONSTANT_TYPES)):
        return

    def check(entry: Any) -> None:
        refuse_objects(entry, where)

    if map_container(thing, check) is thing:
        raise PipelineError(
            f"{where} holds a {type(thing).__name__}; stages can send each other tensors, plain values, and tuples, "
            "lists and dicts of them, but no other objects",
            "If it is a cache of keys and values, set use_cache=False; each stage makes other objects, such as a "
            "BlockMask, by itself with PipelineStrategy(module='')",
        )


def _part(out: Any, path: Path, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the part of a layer's output that the loop passes to later layers.

    If the loop passes on the whole output, it may contain a branch for tuples, which it could not take during the
    recording. Therefore, if the output is a tuple or list, its first entry is returned, unless the first argument of
    the layer was also a tuple or list.
    """
    if not path:
        given = next(iter((*args, *kwargs.values())), None)
        return out[0] if isinstance(out, (tuple, list)) and not isinstance(given, (tuple, list)) else out
    for step in path:
        out = out[step]
    return out


_MODULE_ATTRIBUTES = set(vars(nn.Module()))
"""The names of the attributes that nn.Module defines."""
_SETTING_TYPES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size)
_NUMBER_MARK = "number of the layer"
_ADDRESS_PATTERN = re.compile(r" at 0x[0-9a-f]+")


def describe_layer(layer: nn.Module, number: int = -1) -> tuple[Any, ...]:
    """Return types, settings and shapes of all modules of a layer. They are equal in all processes for equal layers.

    A setting that is equal to `number` is ignored, because some models store the number of each layer in the layer.
    """
    return tuple(_describe_module(part, number) for part in layer.modules())


def identify_layer(layer: nn.Module, number: int, x: Any) -> tuple[Any, ...]:
    """Return a key that is equal for layers of this process that take the same time.

    It consists of the structure of the layer, the ids of its objects, its hooks, and the shapes of its input.

    Args:
        layer: the layer.
        number: the number of the layer.
        x: the input of the layer, which is a tree of tensors, or a tape with its values.
    """
    objects = tuple(id(value) for part in layer.modules() for _, value in _settings(part) if not _is_plain(value))
    hooked = tuple(
        id(part) for part in layer.modules() if any(vars(part)[name] for name in _MODULE_ATTRIBUTES if "hooks" in name)
    )
    call = ""
    if isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], Tape):
        call, x = x[0].describe_call(number), x[1]
    leaves, spec = trees.flatten(x)
    values = tuple(_shape(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)
    shape = str(spec) if not call else ""  # the keys of a tape's values include layer numbers
    return describe_layer(layer, number), objects, hooked, call, shape, values


def _describe_module(part: nn.Module, number: int) -> tuple[Any, ...]:
    settings = tuple((name, _text(value, number)) for name, value in _settings(part))
    parameters = tuple((name, _shape(p)) for name, p in part._parameters.items() if p is not None)
    buffers = tuple((name, _shape(b)) for name, b in part._buffers.items() if b is not None)
    return f"{type(part).__module__}.{type(part).__qualname__}", settings, parameters, buffers, part.training


def _settings(part: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in sorted(vars(part).items()) if name not in _MODULE_ATTRIBUTES)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, _SETTING_TYPES)


def _text(value: Any, number: int) -> str:
    if type(value) is int and value == number:
        return _NUMBER_MARK
    return _ADDRESS_PATTERN.sub("", repr(value)) if not isinstance(value, torch.Tensor) else repr(_shape(value))


def _shape(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad
