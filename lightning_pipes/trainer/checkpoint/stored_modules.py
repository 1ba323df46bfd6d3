"""Modules that a checkpoint stores in addition to its state dict, such as arguments of `save_hyperparameters`.

They share weights with the user's module, whose layers are distributed over the ranks. The file contains a copy of
these modules with the values of the state dict.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_pipes.trainer.cuts.cut import ModuleCut
from lightning_pipes.trainer.user.remote_tensors import RemoteTensor

_ENTRIES_WITHOUT_MODULES = ("state_dict", "optimizer_states")
"""Entries of a checkpoint that contain many tensors and no modules."""


class _Zeros:
    """Placeholder that becomes a tensor of zeros when it is loaded, and needs no memory before that.

    The module with this tensor gets the correct values from the state dict.
    """

    def __init__(self, like: torch.Tensor) -> None:
        self._shape, self._dtype = tuple(like.shape), like.dtype
        self._requires_grad = like.requires_grad if isinstance(like, nn.Parameter) else None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Zeros:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(torch.zeros, dtype=self._dtype)
        if self._requires_grad is None:
            return make, (self._shape,)
        values = _Zeros(torch.empty(self._shape, dtype=self._dtype, device="meta"))
        return nn.Parameter, (values, self._requires_grad)


class _Search(pickle.Pickler):
    """Pickler that detects whether objects contain one of several tensors or modules, at any depth.

    The pickled data is not used.
    """

    def __init__(self, wanted: Mapping[int, Any]) -> None:
        super().__init__(io.BytesIO())
        self._wanted = wanted
        self.found = False

    def persistent_id(self, thing: Any) -> str | None:
        """Return an id for tensors, so that their values are not pickled."""
        self.found = self.found or id(thing) in self._wanted
        return "tensor" if isinstance(thing, torch.Tensor) else None


def complete_modules(checkpoint: dict[str, Any], cut: ModuleCut, share: bool = True) -> dict[str, Any]:
    """Return a checkpoint in which the stored modules have all of their weights.

    Args:
        checkpoint: the checkpoint that Lightning has created, with a state dict.
        cut: the user's module on this rank.
        share: whether stored modules use the tensors of the state dict, which are written only once. If not, and for
            tensors that are not in the state dict, the loaded module has zeros until the state dict is loaded into it.
    """
    state = checkpoint.get("state_dict", {}) if share else {}
    with cut.scope.module_view(True):
        named = cut.name_tensors()
        proxies = cut.replaced_modules()
        wanted = {**named, **{id(proxy): proxy for proxy, _ in proxies}}
        entries = {
            key: value
            for key, value in checkpoint.items()
            if key not in _ENTRIES_WITHOUT_MODULES and _holds_any(value, wanted)
        }
        if not entries:
            return checkpoint
        memo = {number: _value(state.get(name), tensor, share) for number, (name, tensor) in named.items()}
        memo = {number: value for number, value in memo.items() if value is not None}
        for proxy, full in proxies:
            memo[id(proxy)] = copy.deepcopy(full, memo)
        return {**checkpoint, **copy.deepcopy(entries, memo)}


def _value(saved: Any, tensor: torch.Tensor, share: bool) -> Any:
    """Return the stored form of a tensor of the module, or None if a copy of the tensor is stored."""
    if isinstance(saved, torch.Tensor) and saved.shape == tensor.shape:
        return nn.Parameter(saved.detach(), tensor.requires_grad) if isinstance(tensor, nn.Parameter) else saved
    return _Zeros(tensor) if isinstance(tensor, RemoteTensor) or not share else None


def _holds_any(value: Any, wanted: Mapping[int, Any]) -> bool:
    search = _Search(wanted)
    try:
        search.dump(value)
    except Exception:  # the error is raised again when the value is written
        return search.found
    return search.found
