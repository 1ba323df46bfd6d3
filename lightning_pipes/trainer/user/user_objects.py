"""The objects in which the user's code keeps state: modules, containers, and objects of its own classes."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_pipes.engine.compute.reducer import is_distributed

_MAX_LISTED_OBJECTS = 10_000
"""The maximum number of objects that are listed for one layer. If more objects can be reached from a layer, it has a
reference to the whole program.
"""
_MAX_OBJECT_DEPTH = 8
CONTAINER_TYPES = (list, tuple, dict, set, deque)
_SKIPPED_PACKAGES = {*sys.stdlib_module_names, "torch", "numpy", "lightning", "torchmetrics"}
LIGHTNING_ATTRIBUTES = set(vars(pl.LightningModule()))
"""The names of the attributes that nn.Module and LightningModule define."""
_PACKING_METHODS = ("to", "__torch_function__", "__torch_dispatch__", "__tensor_flatten__")
"""Methods that a subclass of nn.Parameter overrides if its parameters have further data besides their values."""


def is_packed(tensor: torch.Tensor | None) -> bool:
    """Return whether a weight has further data besides its values, such as the scales of a quantized weight.

    A subclass of nn.Parameter is not sufficient, because it may only mark weights.
    """
    kind = type(tensor)
    if not isinstance(tensor, nn.Parameter) or kind is nn.Parameter or is_distributed(tensor):
        return False
    own = takewhile(lambda base: base is not nn.Parameter, kind.__mro__)
    changed = any(name in vars(base) for base in own for name in _PACKING_METHODS)
    return changed or not tensor.is_floating_point() or any(isinstance(v, torch.Tensor) for v in vars(tensor).values())


def list_reachable(root: nn.Module | None, name: str, skip: nn.Module | None = None) -> list[tuple[str, Any]]:
    """Return the mutable objects that can be reached from an object, each once.

    Args:
        root: the object, which is listed, too.
        name: the expression with which user code accesses `root`.
        skip: a module that is not searched.

    Returns:
        the expression with which user code accesses each object, and the object.
    """
    found: list[tuple[str, Any]] = []
    seen = {id(skip)}
    queue: deque[tuple[str, Any, int]] = deque([(name, root, 0)])
    while queue and len(found) < _MAX_LISTED_OBJECTS:
        where, thing, depth = queue.popleft()
        if id(thing) in seen or depth > _MAX_OBJECT_DEPTH or not can_change(thing):
            continue
        seen.add(id(thing))
        if not isinstance(thing, tuple):
            found.append((where, thing))
        queue.extend((f"{where}{place}", entry, depth + 1) for place, entry in list_entries(thing))
    return found


def can_change(thing: Any) -> bool:
    """Return whether an object may contain mutable state of the user, which excludes objects of libraries."""
    if isinstance(thing, (nn.Module, *CONTAINER_TYPES, SimpleNamespace)):
        return True
    if isinstance(thing, pl.Callback) and any(map(_is_ours, type(thing).__mro__)):
        return False  # callbacks of this package, such as MemorySwap, refer to objects of this rank
    package = type(thing).__module__.partition(".")[0]
    return (
        hasattr(thing, "__dict__") and not isinstance(thing, (type, torch.Tensor)) and package not in _SKIPPED_PACKAGES
    )


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("lightning_pipes.")


def list_entries(thing: Any) -> list[tuple[str, Any]]:
    """Return the direct entries of an object, each with the expression to append to access it, such as `.name`."""
    if isinstance(thing, nn.Module):
        parts = [*thing._modules.items(), *thing._buffers.items()]
        own = [(name, value) for name, value in vars(thing).items() if name not in LIGHTNING_ATTRIBUTES]
        return [(f".{name}", value) for name, value in (*parts, *own)]
    if isinstance(thing, Mapping):
        return [(f"[{key!r}]", value) for key, value in list(thing.items())]
    if isinstance(thing, CONTAINER_TYPES):
        return [(f"[{number}]", value) for number, value in enumerate(thing)]
    return [(f".{name}", value) for name, value in list(vars(thing).items())]
