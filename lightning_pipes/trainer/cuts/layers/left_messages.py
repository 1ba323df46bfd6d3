"""Messages from one stage to the next: the outputs of its layers, and values that its layers leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from lightning_pipes.engine.compute.sendable import check_sendable
from lightning_pipes.engine.trees import close_objects, open_objects
from lightning_pipes.ir import PipelineError

Place = tuple[Any, ...]
"""The place of a value.

A place in a layer is the number of the layer, the path of a module in it, and a name. A place in an object around the
layers is the path of the object and a key.
"""


class SentValues(NamedTuple):
    """The message of a stage if it contains values of its layers, or one tensor twice."""

    out: Any
    left: dict[Place, Any]


@dataclass(frozen=True)
class RepeatedTensor:
    """Another occurrence of the tensor number `leaf` of a tree."""

    leaf: int


class SharedStorage(NamedTuple):
    """A tensor that shares memory with another tensor of the tree."""

    tensor: Any


def pack_message(out: Any, left: dict[Place, Any]) -> Any:
    """Return the message of a stage.

    A tensor that occurs twice is sent once, and the receiver gets one object in both places. Objects other than
    containers of torch's pytrees are opened, so that their tensors have gradients on both sides.

    Args:
        out: the outputs of the last layer.
        left: the values that layers have left.

    Raises:
        PipelineError: a tensor is distributed, has its own type or attributes, or an object can't be sent.
    """
    if isinstance(out, torch.Tensor) and not left:
        check_sendable(out, "the last layer of a stage returns")
        return out
    opened = open_objects(out)
    leaves, spec = pytree.tree_flatten(SentValues(opened, left))
    seen: dict[Any, int] = {}
    stored: dict[int, list[torch.Tensor]] = {}
    changed = bool(left) or opened is not out
    for at, leaf in enumerate(leaves):
        check_sendable(leaf, "the last layer of a stage returns")
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.is_meta:
            continue
        if id(leaf) in seen:
            leaves[at], changed = RepeatedTensor(seen[id(leaf)]), True
            continue
        seen[id(leaf)] = at
        if leaf.numel():
            others = stored.setdefault(leaf.untyped_storage().data_ptr(), [])
            if any(_overlap(_geometry(leaf), _geometry(other)) for other in others):
                leaves[at], changed = SharedStorage(leaf), True
            others.append(leaf)
    return pytree.tree_unflatten(leaves, spec) if changed else out


def unpack_message(received: Any) -> tuple[Any, dict[Place, Any], list[torch.Tensor]]:
    """Unpack the message of a stage.

    Returns:
        The inputs of the layers, the values that earlier layers have left, and all tensors of the message if some of
        them shared memory with others on the sender.
    """
    if not isinstance(received, SentValues):
        return received, {}, []
    leaves, spec = pytree.tree_flatten(received, is_leaf=lambda node: isinstance(node, SharedStorage))
    sharing = [leaf.tensor for leaf in leaves if isinstance(leaf, SharedStorage)]
    leaves = [leaf.tensor if isinstance(leaf, SharedStorage) else leaf for leaf in leaves]
    leaves = [leaves[leaf.leaf] if isinstance(leaf, RepeatedTensor) else leaf for leaf in leaves]
    whole = pytree.tree_unflatten(leaves, spec)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)] if sharing else []
    return close_objects(whole.out), whole.left, tensors


def _geometry(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


@lru_cache
def _overlap(a: Any, b: Any) -> bool:
    """Return whether two tensors in the same memory have an element in common."""
    ends = [offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) for shape, stride, offset in (a, b)]
    if min(ends) < max(a[2], b[2]):
        return False
    elements = torch.zeros(max(ends) + 1, dtype=torch.bool)
    elements.as_strided(*a).fill_(True)
    return bool(elements.as_strided(*b).any())


def check_unchanged(stage: int, tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Refuse layers that change a tensor in place, if in one process it shares memory with another tensor.

    Args:
        stage: the number of the stage.
        tensors: the tensors of the message that the stage received.
        versions: the versions of the tensors when they arrived.

    Raises:
        PipelineError: a tensor has changed.
    """
    for tensor, version in zip(tensors, versions, strict=True):
        if tensor._version != version:
            raise PipelineError(
                f"a layer of stage {stage} changes a tensor of shape {tuple(tensor.shape)} in place. It shares memory "
                "with another tensor that a layer of an earlier stage returns, as a view does. On one process both "
                "would change, here one does. Work on a copy: x = x + 1 in place of x.add_(1), or return x.clone()"
            )
