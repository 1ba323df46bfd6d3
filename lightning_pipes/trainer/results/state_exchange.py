"""Changes of a module's state in the form in which ranks exchange them."""

from __future__ import annotations

import pickle
from collections.abc import Collection
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.utils import _pytree as pytree

from lightning_pipes.trainer.results.merging import Path, format_path
from lightning_pipes.trainer.results.module_entries import MISSING, Content, follow_path, read_entries, write_entries
from lightning_pipes.trainer.results.watched_objects import WatchedObject
from lightning_pipes.trainer.user.remote_tensors import RemoteTensor


@dataclass
class StateChange:
    """The entries of a holder that differ from the entries before the batch.

    Attributes:
        path: the path of the holder.
        values: the new entries.
        gone: the keys of removed entries.
        tail: for a list, the index from which its entries are replaced, and the new entries.
        in_place: the keys of tensors that were changed in place.
        on_device: whether a tensor is on a device other than the CPU.
        own: the keys of entries that can't be sent; None if no entry can be sent. Each rank keeps its own entries.
    """

    path: Path
    values: Any = None
    gone: Collection[Any] = ()
    tail: tuple[int, list[Any]] | None = None
    in_place: Collection[Any] = ()
    on_device: bool = False
    own: Collection[Any] | None = ()


class StateExchange:
    """Describes changes of the state for other ranks, and applies the changes of other ranks.

    Args:
        module: the module with the state.
        device: the device of this rank.

    Attributes:
        in_hook: whether a hook of the user has made the changes. Objects that it sets stay on their ranks.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device
        self._refused: set[Path] = set()
        self.in_hook = False

    def find_change(self, holder: WatchedObject, content: Content, written: Collection[int]) -> StateChange | None:
        """Return the change of an object for other ranks.

        Args:
            holder: the object.
            content: its present entries.
            written: the ids of the tensors that were changed in place.
        """
        kept = holder.kept
        if isinstance(content, list) and isinstance(kept, list) and isinstance(holder.thing, list):
            same = len(content) >= len(kept) and all(map(is_, content, kept))
            start = len(kept) if same and not any(id(t) in written for t in holder.tensors) else 0
            tail = self._select_sendable(holder.path, content[start:])
            if tail is MISSING:
                return StateChange(holder.path, own=None)
            return StateChange(holder.path, tail=(start, tail), on_device=_on_device(tail))
        if not isinstance(content, dict):
            values = self._select_sendable(holder.path, content)
            if values is MISSING:
                return StateChange(holder.path, own=None)
            return StateChange(holder.path, values, on_device=_on_device(values))
        assert isinstance(kept, dict)
        found, in_place, own = {}, [], []
        for key, value in content.items():
            if kept.get(key, MISSING) is value and id(value) not in written:
                continue
            if kept.get(key, MISSING) is value:
                in_place.append(key)
            sent = self._select_sendable((*holder.path, (".", key)), value)
            if sent is MISSING:
                own.append(key)
            else:
                found[key] = sent
        gone = [key for key in kept if key not in content]
        return StateChange(holder.path, found, gone, None, in_place, _on_device(found), own)

    def _select_sendable(self, path: Path, value: Any) -> Any:
        value = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, value)
        leaves = pytree.tree_leaves(value)
        if any(isinstance(leaf, RemoteTensor) for leaf in leaves):
            return MISSING  # hooks have computed it from weights, on each rank from its own
        if all(isinstance(leaf, (torch.Tensor, str, bytes, int, float, complex, type(None))) for leaf in leaves):
            return value
        if self.in_hook:
            return MISSING
        try:
            pickle.dumps(value)
        except Exception as error:
            if path not in self._refused:
                self._refused.add(path)
                rank_zero_warn(
                    f"{format_path(path)} was set on the last stage to a value that can't be sent to other ranks "
                    f"({type(error).__name__}: {error}). Their hooks, layers and code before the layers don't have "
                    "it. Keep numbers, tensors, and lists and dicts of them"
                )
            return MISSING
        return value

    def own_entries(self, change: StateChange) -> Content | None:
        """Return the entries of this rank that can't be sent."""
        if change.own is not None and not change.own:
            return None
        try:
            content = read_entries(follow_path(self._module, change.path))
        except (LookupError, AttributeError, TypeError):  # only the last stage has the object
            return None
        if change.own is None or not isinstance(content, dict):
            return content
        return {key: content[key] for key in change.own if key in content}

    def apply_change(self, change: StateChange, own: Content | None) -> None:
        """Apply a change of another rank to this rank's object.

        Args:
            change: the change.
            own: the entries of this rank that `own_entries` returned before the batch was undone.
        """
        thing = follow_path(self._module, change.path)
        if change.own is None:
            if own is not None:
                write_entries(thing, own)
            return
        move = change.on_device and self._device.type != "cpu"
        if change.tail is not None:
            start, tail = change.tail
            thing[start:] = move_data_to_device(tail, self._device) if move else tail
            return
        values = move_data_to_device(change.values, self._device) if move else change.values
        content = read_entries(thing)
        if not isinstance(content, dict):
            write_entries(thing, values)
            return
        for key, value in values.items():
            before = content.get(key)
            if isinstance(before, RemoteTensor):
                continue  # a hook has computed it from weights, on each rank from its own
            if key in change.in_place and isinstance(before, torch.Tensor) and before.shape == value.shape:
                with torch.no_grad():
                    before.copy_(value)
            else:
                content[key] = value
        for key in change.gone:
            content.pop(key, None)
        if isinstance(own, dict):
            content.update(own)
        write_entries(thing, content)


def _on_device(tree: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu" for leaf in pytree.tree_leaves(tree))
