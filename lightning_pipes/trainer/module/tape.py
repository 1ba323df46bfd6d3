"""A loop over layers as data: what each layer is called with. It travels from stage to stage with the values.

Layers that take the same time are recognised by their structure: modules, settings, shapes and input.
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
"""How to get from what a layer returned to a part of it: indices and keys."""

Key = int | tuple[int, Path]
"""Of a value on its way: the number of one from outside of the loop, or a layer and a path into what it returned."""

Around = Callable[[int, nn.Module], AbstractContextManager[None] | None]

PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype, torch.Size, slice, range, Enum)


@dataclass(frozen=True)
class OuterValue:
    """Stands for a value that comes from outside of the loop."""

    number: int


@dataclass(frozen=True)
class Output:
    """A reference to the output of the layer `back` layers ago, or to its part at `path`."""

    back: int
    path: Path = ()


@dataclass(frozen=True)
class LayerCall:
    """Arguments of one layer, with Given and Output in place of values that travel."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Tape(trees.SentWhole):
    """The calls of all layers of a loop, in order, and which values they still need. Not a tree: it travels whole.

    Args:
        last_use: for each value the number of the last layer that needs it.
    """

    def __init__(self, calls: Sequence[LayerCall], last_use: dict[Key, int]) -> None:
        self._calls = list(calls)
        self._last_use = last_use

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tape) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def describe_call(self, number: int) -> str:
        """Return the arguments of one layer as text, without the values of tensors."""

        def text(entry: Any) -> Any:
            return str(tuple(entry.shape)) if isinstance(entry, torch.Tensor) else map_container(entry, text)

        call = self._calls[number]
        return repr((text(call.args), text(call.kwargs)))

    def run(self, number: int, layer: nn.Module, held: dict[Key, Any]) -> Any:
        """Run one layer on the values that have arrived: itself and the values for the layers after it, or
        after the last layer what that returned.

        Raises:
            PipelineError: the layer returned something that can't travel and is needed later.
        """
        call = self._calls[number]
        held = {key: dict(value) if type(value) is dict else value for key, value in held.items()}  # it may be filled

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
    """A layer as a stage runs it: on a tape and its values where it was called in a loop, else on its input.

    Args:
        number: the layer's place in the whole model.
        around: makes what is entered, with number and layer, around its forward, if anything is.
    """

    _run: nn.Module

    def __init__(self, layer: nn.Module, number: int, around: Around) -> None:
        super().__init__()
        self.layer = layer
        self.number = number
        self._around = around
        self.__dict__["_run"] = layer  # nn.Module takes its time to find what is registered

    def forward(self, x: Any) -> Any:
        layer = self._run
        around = self._around(self.number, layer)
        if around is None and not isinstance(x, tuple):  # each call more takes its time between layers
            return layer(x)
        with around or nullcontext():
            if isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], Tape):
                return x[0].run(self.number, layer, x[1])
            return layer(x)

    __call__ = forward  # hooks are on the layer


def fill_tree(tree: Any, value: Callable[[OuterValue | Output], Any]) -> Any:
    """Return the tree with values where Given and Output stand for them."""
    if isinstance(tree, (OuterValue, Output)):
        return value(tree)
    return map_container(tree, lambda entry: fill_tree(entry, value))


def map_container(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return the container with its entries changed; what is no container comes back as it is."""
    if type(tree) in (list, tuple):
        return type(tree)([change(entry) for entry in tree])
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return trees.make_named(tree, map(change, tree))
    if type(tree) in (dict, OrderedDict):
        return type(tree)((key, change(entry)) for key, entry in tree.items())
    return tree


def is_shared_dict(thing: Any) -> bool:
    """Return whether layers may leave something in a dict for later ones: it begins empty, or is a library's own."""
    return isinstance(thing, UserDict) or (type(thing) in (dict, OrderedDict) and not thing)


def refuse_objects(thing: Any, where: str) -> None:
    """Raise PipelineError unless `thing` is made of tensors and plain values only, so that it means the same on
    another rank."""
    if isinstance(thing, (torch.Tensor, *PLAIN)):
        return

    def check(entry: Any) -> None:
        refuse_objects(entry, where)

    if map_container(thing, check) is thing:
        raise PipelineError(
            f"{where} holds a {type(thing).__name__}; between stages travel tensors, plain values, and tuples, lists "
            "and dicts of them, no other objects. If it is a cache of keys and values, set use_cache=False; of others, "
            "such as a BlockMask, each stage makes its own with PipelineStrategy(module='')"
        )


def _part(out: Any, path: Path, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the part of a layer's output that the loop passes on.

    A loop that hands on all of it may have looked whether it is a tuple, which it could not see yet. Then the first
    entry is meant, unless the layer was given a tuple itself.
    """
    if not path:
        given = next(iter((*args, *kwargs.values())), None)
        return out[0] if isinstance(out, (tuple, list)) and not isinstance(given, (tuple, list)) else out
    for step in path:
        out = out[step]
    return out


_OWN = set(vars(nn.Module()))
"""Names that nn.Module keeps for itself."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size)
_NUMBER = "number of the layer"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def describe_layer(layer: nn.Module, number: int = -1) -> tuple[Any, ...]:
    """Return types, settings and shapes of all modules of a layer, equal in every process for layers alike.

    A setting that is the layer's own number is no difference, as models have it that tell their layers apart.
    """
    return tuple(_describe_module(part, number) for part in layer.modules())


def identify_layer(layer: nn.Module, number: int, x: Any) -> tuple[Any, ...]:
    """Return what layers of this process have in common that take the same time: structure, objects and input.

    Args:
        x: the layer's input, a tree of tensors or a tape with the values that are on their way.
    """
    objects = tuple(id(value) for part in layer.modules() for _, value in _settings(part) if not _is_plain(value))
    hooked = tuple(id(part) for part in layer.modules() if any(vars(part)[name] for name in _OWN if "hooks" in name))
    call = ""
    if isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], Tape):
        call, x = x[0].describe_call(number), x[1]
    leaves, spec = trees.flatten(x)
    values = tuple(_shape(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)
    shape = str(spec) if not call else ""  # values of a tape are named by the layers that returned them
    return describe_layer(layer, number), objects, hooked, call, shape, values


def _describe_module(part: nn.Module, number: int) -> tuple[Any, ...]:
    settings = tuple((name, _text(value, number)) for name, value in _settings(part))
    parameters = tuple((name, _shape(p)) for name, p in part._parameters.items() if p is not None)
    buffers = tuple((name, _shape(b)) for name, b in part._buffers.items() if b is not None)
    return f"{type(part).__module__}.{type(part).__qualname__}", settings, parameters, buffers, part.training


def _settings(part: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in sorted(vars(part).items()) if name not in _OWN)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _text(value: Any, number: int) -> str:
    if type(value) is int and value == number:
        return _NUMBER
    return _ADDRESS.sub("", repr(value)) if not isinstance(value, torch.Tensor) else repr(_shape(value))


def _shape(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad
