"""Entries of objects in a module: attributes and buffers of modules, items of containers, fields of objects."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from operator import is_
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_pipes.engine.trees import tensors_in
from lightning_pipes.trainer.results.merging import Path
from lightning_pipes.trainer.user.user_objects import CONTAINER_TYPES, LIGHTNING_ATTRIBUTES, list_entries

HIDDEN_NAMES = frozenset((*LIGHTNING_ATTRIBUTES, *dir(pl.LightningModule), "_metric_attributes"))
"""Names that are not part of the user's state.

They include steps and hooks that were replaced on the instance, for example by wrappers.
"""
MISSING = object()
"""Marks a missing entry."""

Content = dict[Any, Any] | list[Any] | set[Any]
"""The entries of an object."""


def find_kept_tensors(module: nn.Module, rows: int) -> list[str]:
    """Return the attributes of modules that contain a tensor with an axis of `rows` entries.

    Parameters and buffers are left out.
    """
    return [
        ".".join(("self", *filter(None, (path, name))))
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if name not in HIDDEN_NAMES
        and isinstance(value, (torch.Tensor, list, tuple, dict, deque))
        and any(rows in tensor.shape for tensor in tensors_in(value))
    ]


def follow_path(module: nn.Module, path: Path) -> Any:
    """Return the object to which a path leads."""
    thing: Any = module
    for kind, key in path:
        thing = getattr(thing, key) if kind == "." else thing[key]
    return thing


def iterate_entries(thing: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the entries of an object. Each entry is a kind of access, "[" or ".", a key, and a value."""
    if isinstance(thing, Mapping):
        yield from (("[", key, value) for key, value in list(thing.items()))
    elif isinstance(thing, (set, frozenset)):
        return
    elif isinstance(thing, CONTAINER_TYPES):
        yield from (("[", number, value) for number, value in enumerate(thing))
    else:
        yield from ((".", name.removeprefix("."), value) for name, value in list_entries(thing))


def read_entries(thing: Any) -> Content:
    """Return a copy of the entries of an object."""
    if isinstance(thing, nn.Module):
        found = {name: value for name, value in vars(thing).items() if name not in HIDDEN_NAMES}
        found.update(thing._buffers)
        return found
    if isinstance(thing, Mapping):
        return dict(thing)
    if isinstance(thing, set):
        return set(thing)
    return list(thing) if isinstance(thing, CONTAINER_TYPES) else dict(vars(thing))


def view_entries(thing: Any) -> Content:
    """Return the entries of an object that is not a module, and copy them only if necessary."""
    if isinstance(thing, (dict, list, set)):
        return thing
    return (
        list(thing)
        if isinstance(thing, CONTAINER_TYPES)
        else read_entries(thing)
        if isinstance(thing, Mapping)
        else vars(thing)
    )


def write_entries(thing: Any, content: Any) -> None:
    """Replace all entries of an object by the given ones."""
    if isinstance(thing, nn.Module):
        own = vars(thing)
        for name in [name for name in own if name not in HIDDEN_NAMES and name not in content]:
            del own[name]
        for name, value in content.items():
            table = thing._buffers if name in thing._buffers else own
            table[name] = value
    elif isinstance(thing, (dict, set)):
        thing.clear()
        thing.update(content)
    elif isinstance(thing, list):
        thing[:] = content
    elif isinstance(thing, deque):
        thing.clear()
        thing.extend(content)
    else:
        own = vars(thing)
        for name in own.keys() - content.keys():
            del own[name]
        own.update(content)


def have_same_entries(content: Content, kept: Content) -> bool:
    """Return whether two sets of entries contain the same objects."""
    if isinstance(content, dict):
        assert isinstance(kept, dict)
        if len(content) != len(kept):
            return False
        if all(map(is_, content, kept)):
            return all(map(is_, content.values(), kept.values()))
        return all(kept.get(key, MISSING) is value for key, value in content.items())
    if isinstance(content, set):
        return content == kept
    return len(content) == len(kept) and all(map(is_, content, kept))


def entry_values(content: Content) -> Collection[Any]:
    """Return the entries without their keys."""
    return content.values() if isinstance(content, dict) else content


def entry_at(content: Content, key: Any) -> Any:
    """Return the entry with this key or index; None if it does not exist."""
    if isinstance(content, dict):
        return content.get(key)
    return content[key] if isinstance(content, list) and key < len(content) else None


def map_entries(content: Any, change: Callable[[Any, Any], Any]) -> Any:
    """Return the entries with each value replaced by the result of `change` for its key and value."""
    if isinstance(content, dict):
        return {key: change(key, value) for key, value in content.items()}
    return [change(number, value) for number, value in enumerate(content)]


def tensor_version(tensor: torch.Tensor) -> int:
    """Return the number of in-place changes of a tensor, or 0 if torch does not count them."""
    return 0 if tensor.is_inference() else tensor._version


def is_state_tensor(thing: Any) -> bool:
    """Return whether an object is a tensor of the state: not a parameter, and not a tensor without values."""
    return isinstance(thing, torch.Tensor) and not isinstance(thing, nn.Parameter) and not thing.is_meta
