"""The structure of a layer, on which its time depends besides the device: modules, settings, shapes and input."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from lightning_pipes.trainer.module.tape import Tape

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
    leaves, spec = pytree.tree_flatten(x)
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
